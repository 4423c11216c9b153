//! Which links packets take between hosts and aggregator, and what weather these have.

use crate::link::{Cycle, Impairment, Link, LinkSpec, Weather};
use crate::random::{Purpose, Random};
use crate::scenario::{Direction, Place, Scenario, Straggler};
use crate::units::{BitRate, Nanos};

/// A link, by its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinkId(u32);

/// All links, and each host's way to the aggregator and back.
#[derive(Debug)]
pub struct Topology {
    links: Vec<Link>,
    up: Vec<Vec<LinkId>>,
    down: Vec<Vec<LinkId>>,
}

impl Topology {
    /// The network of a scenario.
    #[must_use]
    pub fn new(scenario: &Scenario, seed: u64) -> Topology {
        let (network, hosts) = (&scenario.network, scenario.hosts());
        let mut topology = Topology { links: Vec::new(), up: Vec::new(), down: Vec::new() };
        let clean = Impairment::default();
        let server =
            network.aggregator.map(|spec| (topology.add(spec, clean, seed), topology.add(spec, clean, seed)));
        let mut fabric = Vec::new();
        // The aggregator is on the first leaf; each of the others has a pair of links to each spine, and so has the first.
        if let Some(spec) = network.fabric.filter(|_| network.leaves > 1) {
            for _ in 0..network.leaves * network.spines {
                fabric.push((topology.add(spec, clean, seed), topology.add(spec, clean, seed)));
            }
        }
        for host in 0..hosts {
            let mut up = vec![topology.add(network.host, network.impairment, seed)];
            let mut down = Vec::new();
            let (leaf, spine) = (host as u64 % network.leaves, host as u64 % network.spines);
            if leaf != 0 {
                let at = |leaf: u64| fabric.get((leaf * network.spines + spine) as usize).copied();
                if let (Some((out, back)), Some((first_out, first_back))) = (at(leaf), at(0)) {
                    up.extend([out, first_back]);
                    down.extend([back, first_out]);
                }
            }
            if let Some((to, from)) = server {
                up.push(to);
                down.push(from);
            }
            down.insert(0, topology.add(network.host, network.impairment, seed));
            down.reverse();
            topology.up.push(up);
            topology.down.push(down);
        }
        topology.set_weather(scenario, &fabric, seed);
        topology
    }

    fn add(&mut self, spec: LinkSpec, impairment: Impairment, seed: u64) -> LinkId {
        let place = self.links.len() as u64;
        self.links.push(Link::new(spec, impairment, Random::new(seed, Purpose::Impairment, place)));
        LinkId(place as u32)
    }

    fn set_weather(&mut self, scenario: &Scenario, fabric: &[(LinkId, LinkId)], seed: u64) {
        let hosts = self.up.len();
        for (index, straggler) in scenario.stragglers.iter().enumerate() {
            let (Straggler::SlowLink { ranks, place, direction, .. }
            | Straggler::Background { ranks, place, direction, .. }) = straggler
            else {
                continue;
            };
            let pairs: Vec<(LinkId, LinkId)> = match place {
                Place::Fabric => fabric.to_vec(),
                Place::Host => {
                    let of = |host: usize| Some((*self.up[host].first()?, *self.down[host].last()?));
                    (0..hosts).filter(|host| ranks.has(*host)).filter_map(of).collect()
                }
            };
            let spec = match place {
                Place::Fabric => scenario.network.fabric.unwrap_or(scenario.network.host),
                Place::Host => scenario.network.host,
            };
            for (up, down) in pairs {
                // By the link's number, so that it does not matter who else has bad times.
                let stream = (index as u64) << 32 | u64::from(up.0);
                let (cycle, weather) = weather(straggler, spec, Random::new(seed, Purpose::Weather, stream));
                let both = [(up, Direction::Down), (down, Direction::Up)];
                for (LinkId(id), _) in both.into_iter().filter(|(_, other)| direction != other) {
                    self.links[id as usize].expect(cycle.clone(), weather.clone());
                }
            }
        }
    }

    /// A host's way to the aggregator; its own link is the first.
    #[must_use]
    pub fn up(&self, host: usize) -> &[LinkId] {
        &self.up[host]
    }

    /// The way back; the host's own link is the last.
    #[must_use]
    pub fn down(&self, host: usize) -> &[LinkId] {
        &self.down[host]
    }

    /// Links of a host's way to the aggregator that a request has passed when it is at the switch on the first leaf; an
    /// answer has passed one.
    #[must_use]
    pub fn links_to_switch(&self, host: usize) -> usize {
        self.up[host].len() - 1
    }

    /// A link.
    pub fn link(&mut self, LinkId(id): LinkId) -> &mut Link {
        &mut self.links[id as usize]
    }

    /// All links.
    pub fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter()
    }
}

fn weather(straggler: &Straggler, link: LinkSpec, mut random: Random) -> (Cycle, Weather) {
    match straggler {
        Straggler::SlowLink { factor, period, phase, share, .. } => {
            let by_chance = Nanos(random.below(period.0));
            (Cycle::periodic(*period, *share, phase.unwrap_or(by_chance)), Weather::Slow(*factor))
        }
        Straggler::Background { rate, on, off, .. } => {
            let burst = BitRate((link.rate.0 as f64 * rate) as u64);
            (Cycle::random(*on, *off, random), Weather::Background(burst))
        }
        _ => (Cycle::periodic(Nanos(1), 0.0, Nanos(0)), Weather::Slow(1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{JobSpec, Network};
    use crate::units::Bytes;

    fn scenario(leaves: u64, server: bool) -> Scenario {
        let link = LinkSpec { rate: BitRate(1000), delay: Nanos(1), buffer: Bytes(9000), ecn: None };
        let job = JobSpec {
            name: "j".into(),
            world: 5,
            lanes: 32,
            window: 1,
            memory: crate::scenario::MemoryKind::Reserved,
            slots: 2,
            chunks: 1,
            operations: 1,
            iterations: 1,
            start: Nanos(0),
            compute: Nanos(1),
            first_ready: 1.0,
            jitter: 0.0,
            staleness: 0,
            values: crate::scenario::ValuesKind::FloatSum,
        };
        let network = Network {
            leaves,
            spines: 2,
            packet: Bytes(1500),
            card: crate::scenario::CARD_PACKETS,
            host: link,
            aggregator: server.then_some(link),
            fabric: Some(link),
            impairment: Impairment::default(),
        };
        Scenario {
            description: String::new(),
            seed: 1,
            limit: Nanos(1),
            network,
            pool: None,
            switch: None,
            jobs: vec![job],
            stragglers: Vec::new(),
            memory_damage: 0.0,
        }
    }

    #[test]
    fn ways_have_the_links_they_should() {
        let one = Topology::new(&scenario(1, true), 1);
        assert!((0..5).all(|host| one.up(host).len() == 2 && one.down(host).len() == 2));
        assert_eq!((one.up(0)[1], one.down(0)[0]), (one.up(4)[1], one.down(4)[0]));
        assert_ne!(one.up(0)[0], one.up(1)[0]);
        assert!((0..5).all(|host| one.up(host)[0] != one.down(host)[1]));

        let three = Topology::new(&scenario(3, false), 1);
        assert_eq!((0..5).map(|host| three.up(host).len()).collect::<Vec<_>>(), [1, 3, 3, 1, 3]);
        // Hosts 1 and 4 share a leaf, but not a spine.
        assert_ne!(three.up(1)[1], three.up(4)[1]);
        assert!(three.up(1).iter().all(|id| !three.down(1).contains(id)));
    }
}
