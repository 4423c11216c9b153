//! Loads the programs that disturb a worker's packets, and reads what they did.
//!
//! The programs and their maps are described in `paatp-ebpf/src/disturb.rs`; the types here repeat its layout.

use std::fmt;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::Array;
use aya::programs::tc::{NlOptions, TcAttachOptions, qdisc_add_clsact};
use aya::programs::{SchedClassifier, TcAttachType};
use paatp_common::Seq;
use paatp_common::wire::Kind;
use serde::Serialize;

use crate::lab::lab_object;
use crate::netns::Namespace;

/// How often what happens to a packet, as probabilities from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// It is dropped.
    pub loss: f64,
    /// It is sent twice.
    pub duplicate: f64,
    /// It is held back until its successor has passed.
    pub reorder: f64,
    /// One bit of our header or payload is flipped.
    pub corrupt: f64,
}

impl Rates {
    /// Nothing happens.
    pub const NONE: Rates = Rates { loss: 0.0, duplicate: 0.0, reorder: 0.0, corrupt: 0.0 };

    /// Something happens.
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Rates::NONE
    }
}

/// As seen from the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Its requests.
    Egress,
    /// The answers.
    Ingress,
}

impl Direction {
    /// As seen from the switch's port, where the programs are: what the worker sends comes in.
    const fn at_the_port(self) -> u32 {
        match self {
            Direction::Egress => 1,
            Direction::Ingress => 0,
        }
    }
}

/// Declares the counters in index order.
macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What was done to a worker's packets in one direction.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        impl Counts {
            const COUNT: u32 = [$(stringify!($name),)*].len() as u32;

            fn read(mut next: impl FnMut() -> Result<u64>) -> Result<Counts> {
                Ok(Counts { $($name: next()?,)* })
            }

            /// Adds other counts to these.
            pub fn absorb(&mut self, other: &Counts) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// Packets of ours that came by.
    seen,
    /// Dropped.
    dropped,
    /// Sent twice.
    duplicated,
    /// Held back for their successor.
    delayed,
    /// Held back and sent after all; the others were lost for want of a successor.
    released,
    /// With a flipped bit.
    corrupted,
    /// Of those: in our header.
    corrupted_header,
    /// Of those: behind our header.
    corrupted_payload,
    /// Rolls that could not be carried out.
    failed,
    /// Dropped by the gate; not counted as seen.
    gated,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} packets: {} lost, {} doubled, {} delayed ({} of them for good), {} corrupted ({} in the header, {} in \
             the payload)",
            self.seen,
            self.dropped,
            self.duplicated,
            self.delayed,
            self.delayed - self.released,
            self.corrupted,
            self.corrupted_header,
            self.corrupted_payload,
        )?;
        if self.failed > 0 {
            write!(f, ", {} times in vain", self.failed)?;
        }
        Ok(())
    }
}

/// `Config` of `disturb.rs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Config {
    loss: u32,
    duplicate: u32,
    reorder: u32,
    corrupt: u32,
    seed: u64,
    first_port: u16,
    last_port: u16,
    gated: u32,
    gate: u32,
    reserved: u32,
}

impl Config {
    fn take(&mut self, rates: Rates) {
        self.loss = parts_per_million(rates.loss);
        self.duplicate = parts_per_million(rates.duplicate);
        self.reorder = parts_per_million(rates.reorder);
        self.corrupt = parts_per_million(rates.corrupt);
    }
}

// SAFETY: integers without padding (checked below), any bits are valid.
unsafe impl aya::Pod for Config {}
const _: () = assert!(size_of::<Config>() == 40);

/// Programs on the switch's port of one worker that disturb its packets until this is dropped. (At the worker's own end
/// they would miss what goes past the stack with AF_XDP.)
#[derive(Debug)]
pub struct Disturbance {
    programs: Ebpf,
    configs: [(Direction, Config); 2],
}

impl Disturbance {
    /// Attaches to a worker's port of the switch; [`crate::Lab::disturb`] knows it. Packets are ours if one of their UDP
    /// ports is in `ports`.
    ///
    /// # Errors
    /// Where `lab.bpf.o` is missing or the kernel refuses it.
    pub fn attach(
        switch: &Namespace,
        port: &str,
        ports: std::ops::RangeInclusive<u16>,
        seed: u64,
        egress: Rates,
        ingress: Rates,
    ) -> Result<Disturbance> {
        let mut programs = Ebpf::load_file(lab_object()).context("cannot load lab.bpf.o")?;
        let configs =
            [(Direction::Egress, egress), (Direction::Ingress, ingress)].map(|(direction, rates)| {
                let (first_port, last_port) = (*ports.start(), *ports.end());
                let mut config = Config { seed, first_port, last_port, ..Config::default() };
                config.take(rates);
                (direction, config)
            });
        for (direction, config) in configs {
            configure(&mut programs, direction, config)?;
        }
        for (name, side) in
            [("disturb_egress", TcAttachType::Egress), ("disturb_ingress", TcAttachType::Ingress)]
        {
            let program: &mut SchedClassifier = programs
                .program_mut(name)
                .with_context(|| format!("lab.bpf.o has no program {name}"))?
                .try_into()?;
            program.load()?;
            switch
                .run(|| attach(program, port, side))?
                .with_context(|| format!("cannot attach {name} to {port}"))?;
        }
        Ok(Disturbance { programs, configs })
    }

    /// Changes what happens from now on.
    ///
    /// # Errors
    /// Where the kernel does not let us write the map.
    pub fn change(&mut self, egress: Rates, ingress: Rates) -> Result<()> {
        for ((direction, config), rates) in self.configs.iter_mut().zip([egress, ingress]) {
            config.take(rates);
            configure(&mut self.programs, *direction, *config)?;
        }
        Ok(())
    }

    /// Drops requests of this kind from a chunk on, until [`Disturbance::open`]; the other kind passes, as do requests for
    /// chunks before. The wish that a DATA packet carries is not looked at.
    ///
    /// # Errors
    /// Where the kernel does not let us write the map.
    pub fn gate(&mut self, kind: Kind, from: Seq) -> Result<()> {
        self.set_gate(1 << kind as u32, from.0)
    }

    /// Lets all requests pass again.
    ///
    /// # Errors
    /// Where the kernel does not let us write the map.
    pub fn open(&mut self) -> Result<()> {
        self.set_gate(0, 0)
    }

    fn set_gate(&mut self, gated: u32, gate: u32) -> Result<()> {
        let (programs, [(direction, config), _]) = (&mut self.programs, &self.configs);
        configure(programs, *direction, Config { gated, gate, ..*config })
    }

    /// What was done so far.
    ///
    /// # Errors
    /// Where the kernel does not let us read the map.
    pub fn counts(&self, direction: Direction) -> Result<Counts> {
        let counts: Array<_, u64> =
            self.programs.map("DISTURBED").context("lab.bpf.o has no map DISTURBED")?.try_into()?;
        let mut index = direction.at_the_port() * Counts::COUNT;
        Counts::read(|| {
            let value = counts.get(&index, 0)?;
            index += 1;
            Ok(value)
        })
    }
}

fn configure(programs: &mut Ebpf, direction: Direction, config: Config) -> Result<()> {
    let mut configs: Array<_, Config> =
        programs.map_mut("CONFIG").context("lab.bpf.o has no map CONFIG")?.try_into()?;
    Ok(configs.set(direction.at_the_port(), config, 0)?)
}

/// With a link that dies with this process where the kernel has such (6.6), else with a queueing discipline that dies
/// with the interface.
fn attach(program: &mut SchedClassifier, interface: &str, side: TcAttachType) -> Result<()> {
    if program.attach(interface, side).is_ok() {
        return Ok(());
    }
    // It may be there from the other direction.
    let _ = qdisc_add_clsact(interface);
    program.attach_with_options(interface, side, TcAttachOptions::Netlink(NlOptions::default()))?;
    Ok(())
}

fn parts_per_million(probability: f64) -> u32 {
    (probability.clamp(0.0, 1.0) * 1e6).round() as u32
}
