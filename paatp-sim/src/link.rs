//! One direction of a link: a queue of bytes with a rate, a delay, a buffer and a threshold for congestion marks.
//!
//! The queue is its backlog, not a list of packets: a packet's departure is known when it enters. Background traffic is
//! a fluid that enters the same queue while it bursts. Bad times are known ahead, so packets that wait while a link's rate
//! changes leave at the rates that hold then, as from a real queue.

use serde::Deserialize;

use crate::random::Random;
use crate::units::{BitRate, Bytes, Nanos, SECOND};

/// Bytes that Ethernet adds to an IP packet: header 14, FCS 4, preamble 8, gap 12.
pub const ETHERNET_OVERHEAD: u64 = 38;

/// Backlogs are counted in bits × nanoseconds of a second: rate × time without a division.
const NANOBITS_PER_BYTE: u128 = 8 * SECOND as u128;

/// Background traffic takes at most this many twentieths of a link's present rate: it backs off as all traffic must, or a
/// drop-tail queue would let nothing else in for ever.
const BACKGROUND_TWENTIETHS: u64 = 19;

/// What a link is.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Rate on the wire.
    pub rate: BitRate,
    /// Propagation, and whatever else takes the same time for every packet.
    pub delay: Nanos,
    /// Room for waiting bytes; what does not fit is dropped.
    pub buffer: Bytes,
    /// Packets that find more than this waiting are marked; absent: none are.
    pub ecn: Option<Bytes>,
}

/// What goes wrong on a link, by chance, for each packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Impairment {
    /// Probability of loss.
    pub loss: f64,
    /// Probability of a second copy.
    pub duplication: f64,
    /// Probability of being held back.
    pub reordering: f64,
    /// Longest time that a packet is held back.
    pub reordering_delay: Nanos,
    /// Probability that one bit flips.
    pub damage: f64,
}

/// Something that comes and goes.
#[derive(Clone, Debug)]
pub struct Cycle {
    shape: CycleShape,
    on: bool,
    until: Nanos,
}

#[derive(Clone, Debug)]
enum CycleShape {
    Periodic { on: Nanos, off: Nanos },
    Random { on: Nanos, off: Nanos, random: Random },
}

impl Cycle {
    /// On for a share of each period, first after `phase`.
    #[must_use]
    pub fn periodic(period: Nanos, share: f64, phase: Nanos) -> Cycle {
        let on = period.times(share);
        Cycle { shape: CycleShape::Periodic { on, off: period - on }, on: false, until: phase }
    }

    /// On and off for times that are uniform in half to one and a half of their means.
    #[must_use]
    pub fn random(on: Nanos, off: Nanos, mut random: Random) -> Cycle {
        let until = Nanos(random.below(off.0.saturating_mul(2)));
        Cycle { shape: CycleShape::Random { on, off, random }, on: false, until }
    }

    /// The next stretch begins.
    fn turn(&mut self) {
        self.on = !self.on;
        let on = self.on;
        let span = match &mut self.shape {
            CycleShape::Periodic { on: span, .. } if on => *span,
            CycleShape::Periodic { off, .. } => *off,
            CycleShape::Random { on: span, off, random } => {
                if on { *span } else { *off }.times(random.uniform(0.5, 1.5))
            }
        };
        // At least a nanosecond, so that time goes on.
        self.until = self.until + span.max(Nanos(1));
    }
}

/// What a link does in its bad times.
#[derive(Clone, Debug)]
pub enum Weather {
    /// Its rate is multiplied by this.
    Slow(f64),
    /// Others send at this rate.
    Background(BitRate),
}

/// What a link has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Packets that entered.
    pub packets: u64,
    /// Bytes of these on the wire.
    pub bytes: u64,
    /// Packets that found no room.
    pub dropped: u64,
    /// Packets lost by chance.
    pub lost: u64,
    /// Packets marked.
    pub marked: u64,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passage {
    /// When it arrives, and when its second copy does.
    pub arrivals: [Option<Nanos>; 2],
    /// It was marked.
    pub congested: bool,
    /// This bit of it flips, counted modulo its length.
    pub damaged: Option<u64>,
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Link {
    spec: LinkSpec,
    impairment: Impairment,
    random: Random,
    weather: Vec<(Cycle, Weather)>,
    rate: u64,
    background: u64,
    backlog: u128,
    at: Nanos,
    last_out: Nanos,
    /// What it has done.
    pub counters: LinkCounters,
}

impl Link {
    /// A link without weather.
    #[must_use]
    pub fn new(spec: LinkSpec, impairment: Impairment, random: Random) -> Link {
        Link {
            spec,
            impairment,
            random,
            weather: Vec::new(),
            rate: spec.rate.0,
            background: 0,
            backlog: 0,
            at: Nanos(0),
            last_out: Nanos(0),
            counters: LinkCounters::default(),
        }
    }

    /// Adds bad times.
    pub fn expect(&mut self, cycle: Cycle, weather: Weather) {
        self.weather.push((cycle, weather));
    }

    /// Bytes waiting now.
    pub fn backlog(&mut self, now: Nanos) -> u64 {
        self.advance(now);
        (self.backlog / NANOBITS_PER_BYTE) as u64
    }

    /// Time until only `bytes` are waiting, if nothing comes to it.
    pub fn time_to_drain_to(&mut self, now: Nanos, bytes: u64) -> Nanos {
        self.advance(now);
        let excess = self.backlog.saturating_sub(u128::from(bytes) * NANOBITS_PER_BYTE);
        self.drained_at(now, excess) - now
    }

    /// When so much of what waits now has left. Background traffic to come enters behind it and does not hold it up.
    fn drained_at(&self, now: Nanos, backlog: u128) -> Nanos {
        let slows = |(_, weather): &&(Cycle, Weather)| matches!(weather, Weather::Slow(_));
        let unchanged = now + Nanos(backlog.div_ceil(u128::from(self.rate)) as u64);
        if self.weather.iter().filter(slows).all(|(cycle, _)| cycle.until >= unchanged) {
            return unchanged;
        }
        let mut ahead: Vec<(Cycle, Weather)> = self.weather.iter().filter(slows).cloned().collect();
        let (mut at, mut left, mut rate) = (now, backlog, u128::from(self.rate));
        loop {
            let out = at + Nanos(left.div_ceil(rate) as u64);
            let next = ahead.iter().map(|(cycle, _)| cycle.until).min().unwrap_or(out);
            if out <= next {
                return out;
            }
            left = left.saturating_sub(rate * u128::from((next - at).0));
            at = next;
            turn_until(&mut ahead, at);
            rate = u128::from(slowed(self.spec.rate, &ahead));
        }
    }

    /// Sends a packet of this many bytes on the wire.
    pub fn send(&mut self, now: Nanos, bytes: u64) -> Passage {
        self.advance(now);
        let (need, room) = (u128::from(bytes) * NANOBITS_PER_BYTE, self.spec.buffer.0);
        if self.backlog + need > u128::from(room) * NANOBITS_PER_BYTE {
            self.counters.dropped += 1;
            return Passage::default();
        }
        let congested = self.spec.ecn.is_some_and(|ecn| self.backlog > u128::from(ecn.0) * NANOBITS_PER_BYTE);
        self.backlog += need;
        let out = self.drained_at(now, self.backlog);
        self.last_out = self.last_out.max(out);
        self.counters.packets += 1;
        self.counters.bytes += bytes;
        self.counters.marked += u64::from(congested);
        self.impair(self.last_out + self.spec.delay, congested)
    }

    fn impair(&mut self, arrival: Nanos, congested: bool) -> Passage {
        let Impairment { loss, duplication, reordering, reordering_delay, damage } = self.impairment;
        let random = &mut self.random;
        let mut passage = Passage { arrivals: [None; 2], congested, damaged: None };
        let copies = 1 + usize::from(random.chance(duplication));
        for place in passage.arrivals.iter_mut().take(copies) {
            if random.chance(loss) {
                self.counters.lost += 1;
                continue;
            }
            let held = if random.chance(reordering) { random.below(reordering_delay.0) } else { 0 };
            *place = Some(arrival + Nanos(held));
        }
        if random.chance(damage) {
            passage.damaged = Some(random.any());
        }
        passage
    }

    /// Brings backlog, rate and background to a time.
    fn advance(&mut self, now: Nanos) {
        while self.at < now {
            let next = self.weather.iter().map(|(cycle, _)| cycle.until).min().unwrap_or(now).min(now);
            let span = u128::from((next - self.at).0);
            if span > 0 {
                let inflow = self.backlog + u128::from(self.background) * span;
                let room = u128::from(self.spec.buffer.0) * NANOBITS_PER_BYTE;
                self.backlog = inflow.saturating_sub(u128::from(self.rate) * span).min(room);
                self.at = next;
            }
            if turn_until(&mut self.weather, self.at) {
                self.read_weather();
            }
        }
    }

    fn read_weather(&mut self) {
        let others = self.weather.iter().filter(|(cycle, _)| cycle.on).map(|(_, weather)| match weather {
            Weather::Background(other) => other.0,
            Weather::Slow(_) => 0,
        });
        let background: u64 = others.sum();
        self.rate = slowed(self.spec.rate, &self.weather);
        self.background = background.min(self.rate / 20 * BACKGROUND_TWENTIETHS);
    }
}

/// Brings bad times to a time; says whether any began or ended.
fn turn_until(weather: &mut [(Cycle, Weather)], at: Nanos) -> bool {
    let mut turned = false;
    for (cycle, _) in weather {
        while cycle.until <= at {
            cycle.turn();
            turned = true;
        }
    }
    turned
}

/// What bad times leave of a rate.
fn slowed(rate: BitRate, weather: &[(Cycle, Weather)]) -> u64 {
    let factors = weather.iter().filter(|(cycle, _)| cycle.on).map(|(_, weather)| match weather {
        Weather::Slow(factor) => *factor,
        Weather::Background(_) => 1.0,
    });
    (factors.fold(rate.0 as f64, |rate, factor| rate * factor) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Purpose;

    const SPEC: LinkSpec = LinkSpec {
        rate: BitRate(8_000_000_000),
        delay: Nanos(100),
        buffer: Bytes(3000),
        ecn: Some(Bytes(1000)),
    };

    fn link(impairment: Impairment) -> Link {
        Link::new(SPEC, impairment, Random::new(1, Purpose::Impairment, 0))
    }

    fn arrival(passage: Passage) -> Option<u64> {
        passage.arrivals[0].map(|at| at.0)
    }

    #[test]
    fn packets_queue_are_marked_and_dropped() {
        let mut link = link(Impairment::default());
        let fates: Vec<_> = (0..4).map(|_| link.send(Nanos(0), 1000)).collect();
        assert_eq!(
            fates.iter().map(|p| arrival(*p)).collect::<Vec<_>>(),
            [Some(1100), Some(2100), Some(3100), None]
        );
        assert_eq!(fates.iter().map(|p| p.congested).collect::<Vec<_>>(), [false, false, true, false]);
        assert_eq!((link.backlog(Nanos(1500)), link.time_to_drain_to(Nanos(1500), 1000)), (1500, Nanos(500)));
        assert_eq!(arrival(link.send(Nanos(5000), 1000)), Some(6100));
        let LinkCounters { packets, bytes, dropped, marked, .. } = link.counters;
        assert_eq!((packets, bytes, dropped, marked), (4, 4000, 1, 1));
    }

    #[test]
    fn a_slow_link_is_slow_for_its_share_of_the_time() {
        let mut link = link(Impairment::default());
        link.expect(Cycle::periodic(Nanos(10_000), 0.5, Nanos(5000)), Weather::Slow(0.25));
        let mut take = |at| arrival(link.send(Nanos(at), 1000)).map(|out| out - at - 100);
        assert_eq!(
            [take(0), take(5000), take(9500), take(20_000), take(25_000)],
            // The third has 125 of its bytes out when the link is fast again.
            [Some(1000), Some(4000), Some(1375), Some(1000), Some(4000)]
        );
    }

    #[test]
    fn what_waits_leaves_at_the_rate_that_comes() {
        let mut link = link(Impairment::default());
        link.expect(Cycle::periodic(Nanos(10_000), 0.5, Nanos(5000)), Weather::Slow(0.25));
        let outs: Vec<_> = (0..3).map(|_| arrival(link.send(Nanos(9000), 1000)).map(|at| at - 100)).collect();
        assert_eq!(outs, [Some(10_750), Some(11_750), Some(12_750)]);
        assert_eq!(link.time_to_drain_to(Nanos(9000), 1000), Nanos(2750));
        // And the other way round: half of the second is out when the link gets slow.
        assert_eq!(arrival(link.send(Nanos(13_500), 1000)), Some(14_600));
        assert_eq!(arrival(link.send(Nanos(13_500), 1000)), Some(17_100));
    }

    /// Of a burst at the link's own rate, the queue keeps what a foreground packet adds.
    #[test]
    fn background_traffic_takes_its_share() {
        let mut link = link(Impairment::default());
        let whole = Cycle::periodic(Nanos(1_000_000), 1.0, Nanos(0));
        link.expect(whole, Weather::Background(BitRate(4_000_000_000)));
        assert_eq!(link.backlog(Nanos(10_000)), 0);
        assert_eq!(arrival(link.send(Nanos(10_000), 1000)), Some(11_100));
        // A thousand nanoseconds drain 1000 bytes and bring 500.
        assert_eq!(link.backlog(Nanos(11_000)), 500);
    }

    #[test]
    fn chance_loses_doubles_and_holds_back() {
        let bad = Impairment {
            loss: 0.2,
            duplication: 0.3,
            reordering: 0.5,
            reordering_delay: Nanos(1000),
            damage: 0.1,
        };
        let mut link = link(bad);
        let fates: Vec<_> = (0..1000_u64).map(|i| link.send(Nanos(i * 2000), 1000)).collect();
        let copies = fates.iter().flat_map(|p| p.arrivals).flatten().count();
        assert!((900..1200).contains(&copies), "{copies}");
        assert!((160..360).contains(&link.counters.lost), "{:?}", link.counters);
        assert!(fates.iter().filter(|p| p.damaged.is_some()).count() > 50);
    }
}
