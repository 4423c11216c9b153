//! Writes pcapng (draft-ietf-opsawg-pcapng): one section, one interface, times in nanoseconds.

use std::io::{self, Write};

/// Types of blocks.
const SECTION: u32 = 0x0A0D_0D0A;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

/// Link type "Ethernet".
const ETHERNET: u16 = 1;

/// Numbers of options, each counted for its type of block.
const END: u16 = 0;
const SECTION_PROGRAM: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_DESCRIPTION: u16 = 3;
const INTERFACE_RESOLUTION: u16 = 9;
const PACKET_FLAGS: u16 = 2;
const STATISTICS_SEEN: u16 = 4;
const STATISTICS_LOST: u16 = 5;
const STATISTICS_CHOSEN: u16 = 6;

/// Times are multiples of 10^-9 seconds.
const NANOSECONDS: u8 = 9;

/// Where a packet went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Direction {
    /// To the interface.
    Inbound = 1,
    /// From it.
    Outbound = 2,
}

/// A packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// When, since 1970, in nanoseconds.
    pub time_ns: u64,
    /// Where it went.
    pub direction: Direction,
    /// Bytes that it has.
    pub length: u32,
    /// Those that were kept, from the link's header on.
    pub bytes: &'a [u8],
}

/// What is known at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Packets that came by.
    pub seen: u64,
    /// Of those: asked for.
    pub chosen: u64,
    /// Of those: lost on the way into the file.
    pub lost: u64,
}

/// A file under way.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    block: Vec<u8>,
    last_time_ns: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn new(out: W, interface: &str, description: &str) -> io::Result<Writer<W>> {
        let mut writer = Writer { out, block: Vec::new(), last_time_ns: 0 };
        let program = concat!("paatp ", env!("CARGO_PKG_VERSION"));
        // Byte order, version 1.0, and a length that is not told.
        writer.begin(SECTION);
        for word in [0x1A2B_3C4D, 1, u32::MAX, u32::MAX] {
            writer.word(word);
        }
        writer.option(SECTION_PROGRAM, program.as_bytes());
        writer.end()?;
        writer.begin(INTERFACE);
        writer.word(u32::from(ETHERNET));
        // Any length.
        writer.word(0);
        writer.option(INTERFACE_NAME, interface.as_bytes());
        writer.option(INTERFACE_DESCRIPTION, description.as_bytes());
        writer.option(INTERFACE_RESOLUTION, &[NANOSECONDS]);
        writer.end()?;
        Ok(writer)
    }

    /// Adds a packet.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn packet(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        self.last_time_ns = packet.time_ns;
        self.begin(PACKET);
        self.word(0);
        self.time(packet.time_ns);
        self.word(packet.bytes.len() as u32);
        self.word(packet.length);
        self.padded(packet.bytes);
        self.option(PACKET_FLAGS, &(packet.direction as u32).to_le_bytes());
        self.end()
    }

    /// Ends the file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(mut self, totals: Totals) -> io::Result<W> {
        self.begin(STATISTICS);
        self.word(0);
        self.time(self.last_time_ns);
        let counts = [
            (STATISTICS_SEEN, totals.seen),
            (STATISTICS_LOST, totals.lost),
            (STATISTICS_CHOSEN, totals.chosen),
        ];
        for (option, count) in counts {
            self.option(option, &count.to_le_bytes());
        }
        self.end()?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// Hands on what was written.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn begin(&mut self, kind: u32) {
        self.block.clear();
        self.word(kind);
        // The length, when it is known.
        self.word(0);
    }

    fn word(&mut self, word: u32) {
        self.block.extend_from_slice(&word.to_le_bytes());
    }

    /// Upper half first, whatever the byte order.
    fn time(&mut self, time_ns: u64) {
        self.word((time_ns >> 32) as u32);
        self.word(time_ns as u32);
    }

    fn padded(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    fn option(&mut self, number: u16, value: &[u8]) {
        // Longer texts than an option takes are of nobody's making.
        let value = value.get(..usize::from(u16::MAX)).unwrap_or(value);
        self.block.extend_from_slice(&number.to_le_bytes());
        self.block.extend_from_slice(&(value.len() as u16).to_le_bytes());
        self.padded(value);
    }

    fn end(&mut self) -> io::Result<()> {
        self.option(END, &[]);
        let length = (self.block.len() + 4) as u32;
        self.word(length);
        if let Some(place) = self.block.get_mut(4..8) {
            place.copy_from_slice(&length.to_le_bytes());
        }
        self.out.write_all(&self.block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(bytes: &[u8], at: usize) -> u32 {
        bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes)
    }

    /// Blocks follow one another exactly, each with its length at both ends.
    #[test]
    fn blocks_are_whole() {
        let mut bytes = Vec::new();
        let mut writer =
            Writer::new(&mut bytes, "eth0", "a socket").unwrap_or_else(|error| panic!("{error}"));
        for length in 0..9 {
            let packet = Packet {
                time_ns: 0x1_2345_6789_0000 + length,
                direction: Direction::Outbound,
                length: 1500,
                bytes: &[7; 16][..length as usize],
            };
            assert!(writer.packet(&packet).is_ok());
        }
        assert!(writer.finish(Totals { seen: 3, chosen: 2, lost: 1 }).is_ok());
        let (mut at, mut kinds) = (0, Vec::new());
        while at < bytes.len() {
            let length = word(&bytes, at + 4) as usize;
            assert!(length >= 12 && length.is_multiple_of(4), "{length}");
            assert_eq!(word(&bytes, at + length - 4) as usize, length);
            kinds.push(word(&bytes, at));
            at += length;
        }
        assert_eq!(at, bytes.len());
        assert_eq!(
            (kinds.first(), kinds.get(1), kinds.last()),
            (Some(&SECTION), Some(&INTERFACE), Some(&STATISTICS))
        );
        assert_eq!(kinds.iter().filter(|kind| **kind == PACKET).count(), 9);
    }
}
