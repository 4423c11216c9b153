//! What `paatp run` is told of a switch.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use thiserror::Error;

use crate::control::listen::parse_address;

/// The TCP port that is registered for P4Runtime.
pub const P4RUNTIME_PORT: u16 = 9559;
/// The largest port that the program can name: nine bits.
pub const MAX_SWITCH_PORT: u16 = (1 << 9) - 1;

/// The options of `paatp run` that say which switch, and who is where on it.
#[derive(Clone, Debug, Default, Args)]
pub struct SwitchOptions {
    /// Programmable switch in front of this aggregator, by the address of its P4Runtime server: jobs are put into its
    /// tables. Implies --levels; needs --switch-port.
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = address)]
    pub switch: Option<SocketAddr>,
    /// Who is at a port of the switch: IPv4 address, Ethernet address and number of the port, for each worker and for this
    /// aggregator; with commas between the three. May be given several times. Workers that are not named are beside the switch.
    #[arg(long, value_name = "ADDR,MAC,PORT", value_delimiter = ' ')]
    pub switch_port: Vec<Station>,
    /// The switch's number behind its P4Runtime server (device_id).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub switch_device: u64,
    /// Slots of the switch's table that jobs may use, a power of two [default: all].
    #[arg(long, value_name = "N", value_parser = slots)]
    pub switch_slots: Option<u32>,
    /// Load this program into the switch, unless it has it: the compiled program and its P4Info (binary), as
    /// `p4c-bm2-ss -o FILE --p4runtime-files P4INFO.bin` makes them [default: the switch has it already].
    #[arg(long, value_name = "FILE,P4INFO.bin")]
    pub switch_pipeline: Option<PipelineFiles>,
}

/// The options do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OptionsError {
    /// Nobody is at the switch.
    #[error(
        "--switch {0} needs to know who is at which port of it: give --switch-port ADDR,MAC,PORT for each worker and for this aggregator"
    )]
    NoPorts(SocketAddr),
    /// There is no switch.
    #[error("--switch-port says who is at a switch, and there is none; say which with --switch ADDR[:PORT]")]
    NoSwitch,
    /// Two stations have one address, or one Ethernet address is at two ports.
    #[error("--switch-port {0} and --switch-port {1} contradict each other; every address is at one port")]
    Contradiction(Station, Station),
}

/// Somebody at a port of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Station {
    /// Where packets of a rank come from.
    pub address: Ipv4Addr,
    /// Its Ethernet address, as the switch sees it.
    pub mac: [u8; 6],
    /// The port.
    pub port: u16,
}

impl fmt::Display for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, last] = self.mac;
        write!(f, "{},{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{last:02x},{}", self.address, self.port)
    }
}

/// A text says of nobody where he is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StationError {
    /// Not three parts.
    #[error(
        "write IPv4 address, Ethernet address and port with commas between: 10.0.0.2,02:50:00:00:00:02,3"
    )]
    Parts,
    /// The first part.
    #[error("`{0}` is no IPv4 address; a switch adds for workers with one only")]
    Address(String),
    /// The second part.
    #[error("`{0}` is no Ethernet address of one station; write for example 02:50:00:00:00:02")]
    Mac(String),
    /// The third part.
    #[error("`{0}` is no port of a switch; 0 to {MAX_SWITCH_PORT} are")]
    Port(String),
}

impl FromStr for Station {
    type Err = StationError;

    fn from_str(text: &str) -> Result<Station, StationError> {
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        let [address, mac, port] = parts[..] else { return Err(StationError::Parts) };
        Ok(Station {
            address: address.parse().map_err(|_| StationError::Address(address.into()))?,
            mac: read_mac(mac).ok_or_else(|| StationError::Mac(mac.into()))?,
            port: port
                .parse()
                .ok()
                .filter(|port| *port <= MAX_SWITCH_PORT)
                .ok_or_else(|| StationError::Port(port.into()))?,
        })
    }
}

fn read_mac(text: &str) -> Option<[u8; 6]> {
    let is_byte = |part: &str| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |part: &str| is_byte(part).then(|| u8::from_str_radix(part, 16).ok()).flatten();
    let bytes: Vec<u8> = text.split(':').map(byte).collect::<Option<_>>()?;
    let mac: [u8; 6] = bytes.try_into().ok()?;
    // Not all zeros, and no group.
    (mac != [0; 6] && mac[0] & 1 == 0).then_some(mac)
}

/// A program for the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineFiles {
    /// What the switch runs.
    pub program: PathBuf,
    /// What it is called, as P4Info in protobuf's binary form.
    pub info: PathBuf,
}

impl FromStr for PipelineFiles {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<PipelineFiles, &'static str> {
        match text.split_once(',') {
            Some((program, info)) if !program.is_empty() && !info.is_empty() => {
                Ok(PipelineFiles { program: program.into(), info: info.into() })
            }
            _ => Err("write two files with a comma between: paatp.json,paatp.p4info.bin"),
        }
    }
}

/// The address of a P4Runtime server, for clap.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    parse_address(text, P4RUNTIME_PORT).map_err(|_| {
        format!("`{text}` is no address; write for example 10.0.0.9 or 10.0.0.9:{P4RUNTIME_PORT}")
    })
}

fn slots(text: &str) -> Result<u32, String> {
    let slots = text.parse::<u32>().ok().filter(|slots| slots.is_power_of_two());
    slots.ok_or_else(|| format!("`{text}` is no power of two, as 1024 is"))
}

/// A switch, and who is where on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Its P4Runtime server.
    pub address: SocketAddr,
    /// Its number there.
    pub device: u64,
    /// Who is at its ports.
    pub stations: Vec<Station>,
    /// Slots that may be used, if not all.
    pub slots: Option<u32>,
    /// What to load into it.
    pub pipeline: Option<PipelineFiles>,
}

impl SwitchOptions {
    /// The switch that they name, if they name one.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn setup(&self) -> Result<Option<Setup>, OptionsError> {
        let stations = &self.switch_port;
        let Some(address) = self.switch else {
            let is_alone =
                stations.is_empty() && self.switch_slots.is_none() && self.switch_pipeline.is_none();
            return if is_alone { Ok(None) } else { Err(OptionsError::NoSwitch) };
        };
        if stations.is_empty() {
            return Err(OptionsError::NoPorts(address));
        }
        for (index, one) in stations.iter().enumerate() {
            let contradicts = |other: &&Station| {
                other.address == one.address || other.mac == one.mac && other.port != one.port
            };
            if let Some(other) = stations.iter().take(index).find(contradicts) {
                return Err(OptionsError::Contradiction(*other, *one));
            }
        }
        Ok(Some(Setup {
            address,
            device: self.switch_device,
            stations: stations.clone(),
            slots: self.switch_slots,
            pipeline: self.switch_pipeline.clone(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "10.0.0.2,02:50:00:00:00:0A,3";

    fn station(text: &str) -> Result<Station, StationError> {
        text.parse()
    }

    #[test]
    fn stations_are_read_and_written() {
        let read = station(ONE).map(|station| station.to_string());
        assert_eq!(read, Ok(ONE.to_lowercase()));
        assert_eq!(station("10.0.0.2"), Err(StationError::Parts));
        for (text, part) in [
            ("fd00::1,02:50:00:00:00:0a,3", "fd00::1"),
            ("10.0.0.2,02:50:00:00:00,3", "02:50:00:00:00"),
            ("10.0.0.2,ff:ff:ff:ff:ff:ff,3", "ff:ff"),
            ("10.0.0.2,02:50:00:00:00:+a,3", "+a"),
            ("10.0.0.2,02:50:00:00:00:0a,512", "`512`"),
        ] {
            let message = station(text).err().map(|error| error.to_string());
            assert!(message.is_some_and(|message| message.contains(part)), "{text}");
        }
    }

    #[test]
    fn options_fit_together() {
        let ports = |texts: &[&str]| texts.iter().filter_map(|text| station(text).ok()).collect();
        let address = SocketAddr::from(([10, 0, 0, 9], P4RUNTIME_PORT));
        let setup =
            |switch, ports| SwitchOptions { switch, switch_port: ports, ..SwitchOptions::default() }.setup();
        assert_eq!(setup(None, vec![]), Ok(None));
        assert_eq!(setup(None, ports(&[ONE])), Err(OptionsError::NoSwitch));
        assert_eq!(setup(Some(address), vec![]), Err(OptionsError::NoPorts(address)));
        let twice = ports(&[ONE, "10.0.0.2,02:50:00:00:00:0b,4"]);
        assert!(matches!(setup(Some(address), twice), Err(OptionsError::Contradiction(..))));
        let moved = ports(&[ONE, "10.0.0.3,02:50:00:00:00:0a,4"]);
        assert!(matches!(setup(Some(address), moved), Err(OptionsError::Contradiction(..))));
        // A machine may have two addresses, and a port many machines.
        let both = ports(&[ONE, "10.0.0.3,02:50:00:00:00:0a,3", "10.0.0.4,02:50:00:00:00:0b,3"]);
        assert!(setup(Some(address), both).is_ok_and(|setup| setup.is_some_and(|s| s.stations.len() == 3)));
        assert_eq!(super::address("10.0.0.9"), Ok(address));
        assert!(super::address("switch").is_err() && slots("1000").is_err() && slots("16") == Ok(16));
        assert!("a,b".parse::<PipelineFiles>().is_ok() && "a".parse::<PipelineFiles>().is_err());
    }
}
