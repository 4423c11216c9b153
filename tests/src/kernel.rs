//! Looks into the aggregator's maps from outside: from the interface to its XDP program, from there to the maps.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use aya::maps::{Array, Map, MapData, MapInfo, MapType, PerCpuArray};
use aya::programs::loaded_programs;
use paatp_common::counter::Counters;
use paatp_common::slot::Slot;

use crate::netns::Namespace;

/// The `bpf` system call works for this process.
///
/// # Errors
/// What the kernel said.
pub fn probe() -> std::io::Result<()> {
    /// `BPF_MAP_CREATE` of `enum bpf_cmd`.
    const MAP_CREATE: libc::c_long = 0;
    // The head of `union bpf_attr` for that command: type (2: array), key size, value size, entries.
    let attributes: [u32; 4] = [2, 4, 4, 1];
    // SAFETY: pointer and size describe `attributes`, which the kernel only reads.
    let descriptor =
        unsafe { libc::syscall(libc::SYS_bpf, MAP_CREATE, attributes.as_ptr(), size_of_val(&attributes)) };
    let descriptor = i32::try_from(descriptor).unwrap_or(-1);
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: a descriptor of our own that nobody else knows.
    unsafe { libc::close(descriptor) };
    Ok(())
}

/// An XDP program on an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedXdp {
    /// Number of the program.
    pub id: u32,
    /// Name of the program.
    pub name: String,
    /// In the driver, not in the stack.
    pub is_native: bool,
}

/// The XDP program on an interface, if there is one.
///
/// # Errors
/// Where there is no such interface.
pub fn attached(namespace: &Namespace, interface: &str) -> Result<Option<AttachedXdp>> {
    /// `XDP_ATTACHED_DRV` of the kernel.
    const NATIVE: u64 = 1;
    let links = namespace.ip_json(&["-details", "link", "show", "dev", interface])?;
    let xdp = &links[0]["xdp"];
    let Some(id) = xdp["prog"]["id"].as_u64() else { return Ok(None) };
    Ok(Some(AttachedXdp {
        id: u32::try_from(id)?,
        name: xdp["prog"]["name"].as_str().unwrap_or_default().to_owned(),
        is_native: xdp["mode"].as_u64() == Some(NATIVE),
    }))
}

/// The maps of one loaded program.
#[derive(Debug)]
pub struct Maps {
    ids: Vec<u32>,
}

impl Maps {
    /// Those of the program with this number.
    ///
    /// # Errors
    /// Where no such program is loaded.
    pub fn of(program: u32) -> Result<Maps> {
        for info in loaded_programs() {
            // Programs of others may go away meanwhile.
            let Ok(info) = info else { continue };
            if info.id() == program {
                let ids = info.map_ids()?.context("the kernel does not tell a program's maps")?;
                return Ok(Maps { ids });
            }
        }
        bail!("no BPF program has the number {program}")
    }

    /// Those of the XDP program on an interface.
    ///
    /// # Errors
    /// Where none is attached.
    pub fn on(namespace: &Namespace, interface: &str) -> Result<Maps> {
        let program = attached(namespace, interface)?
            .with_context(|| format!("no XDP program on {interface} in {}", namespace.name()))?;
        Maps::of(program.id)
    }

    /// A map by its name.
    ///
    /// # Errors
    /// Where the program has none of this name.
    pub fn map(&self, name: &str) -> Result<Map> {
        for id in &self.ids {
            let info = MapInfo::from_id(*id)?;
            if info.name_as_str() == Some(name) {
                let data = MapData::from_id(*id)?;
                return Ok(match info.map_type()? {
                    MapType::Array => Map::Array(data),
                    MapType::PerCpuArray => Map::PerCpuArray(data),
                    other => bail!("the map {name} is of the unexpected type {other:?}"),
                });
            }
        }
        bail!("the program has no map {name}")
    }

    /// An array.
    ///
    /// # Errors
    /// Where there is none of this name with values of this size.
    pub fn array<T: aya::Pod>(&self, name: &str) -> Result<Array<MapData, T>> {
        Array::try_from(self.map(name)?).with_context(|| format!("the map {name}"))
    }

    /// The aggregator's counters, summed over all CPUs.
    ///
    /// # Errors
    /// Where the program has none.
    pub fn counters(&self) -> Result<Counters> {
        let map: PerCpuArray<MapData, PodOf<Counters>> = self.map("COUNTERS")?.try_into()?;
        let mut sum = Counters::default();
        for counters in map.get(&0, 0)?.iter() {
            sum.absorb(&counters.0);
        }
        Ok(sum)
    }
}

/// The slots of a node, mapped into this process: what the program writes is seen here, and the other way round.
#[derive(Debug)]
pub struct SlotMemory {
    start: *mut u8,
    bytes: usize,
    slot_bytes: usize,
    // Keeps the map alive.
    _map: MapData,
}

// SAFETY: the memory is shared with the kernel anyway, and only touched atomically.
unsafe impl Send for SlotMemory {}
// SAFETY: as above.
unsafe impl Sync for SlotMemory {}

impl SlotMemory {
    /// Maps the map `SLOTS` or `WIDE_SLOTS`.
    ///
    /// # Errors
    /// Where the program has no such map, or the kernel does not map it.
    pub fn map(maps: &Maps, name: &str) -> Result<SlotMemory> {
        let Map::Array(data) = maps.map(name)? else { bail!("{name} is no array") };
        let info = data.info()?;
        let slot_bytes = info.value_size().next_multiple_of(8) as usize;
        let bytes = slot_bytes * info.max_entries() as usize;
        // SAFETY: a new mapping; the kernel checks descriptor and length.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                data.fd().as_fd().as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error())
                .with_context(|| format!("cannot map {name} into memory"));
        }
        Ok(SlotMemory { start: start.cast(), bytes, slot_bytes, _map: data })
    }

    /// Number of slots.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.bytes / self.slot_bytes
    }

    /// Bits of the lanes of one slot.
    #[must_use]
    pub const fn lane_bits(&self) -> usize {
        (self.slot_bytes - size_of::<Slot>()) * 8
    }

    /// What a slot holds, and the words of its lanes; word by word, so whole only where nobody writes.
    ///
    /// # Panics
    /// Where there is no such slot.
    #[must_use]
    pub fn read(&self, slot: usize) -> (Slot, Vec<u64>) {
        assert!(slot < self.slots());
        let word = |index: usize| {
            // SAFETY: inside the mapping, which begins a page; slots are whole words.
            let word =
                unsafe { AtomicU64::from_ptr(self.start.add(slot * self.slot_bytes + index * 8).cast()) };
            word.load(Ordering::Relaxed)
        };
        const HEAD: usize = size_of::<Slot>() / 8;
        let head: [u64; HEAD] = std::array::from_fn(word);
        (bytemuck::cast(head), (HEAD..self.slot_bytes / 8).map(word).collect())
    }

    /// Flips one bit of a slot's lanes, as broken memory would.
    ///
    /// # Panics
    /// Where there is no such slot or bit.
    pub fn flip(&self, slot: usize, bit: usize) {
        assert!(slot < self.slots() && bit < self.lane_bits());
        let offset = slot * self.slot_bytes + size_of::<Slot>() + bit / 8;
        // SAFETY: inside the mapping; bytes are always aligned.
        let byte = unsafe { AtomicU8::from_ptr(self.start.add(offset)) };
        byte.fetch_xor(1 << (bit % 8), Ordering::Relaxed);
    }
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, which nobody uses any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// A value of `paatp-common` as aya wants it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct PodOf<T>(pub T);

// SAFETY: `bytemuck::Pod` promises what `aya::Pod` asks for: no padding, no invalid bit pattern, no pointer.
unsafe impl<T: bytemuck::Pod> aya::Pod for PodOf<T> {}
