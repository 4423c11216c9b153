//! The tables of a loaded program, whoever loaded it.

use std::collections::BTreeMap;

use aya::Ebpf;
use aya::maps::Map;

/// Maps by the names that they have in the object.
#[derive(Debug, Default)]
pub struct Maps(BTreeMap<String, Map>);

impl Maps {
    /// Takes the maps out of a loaded object.
    pub fn take(ebpf: &mut Ebpf) -> Maps {
        let names: Vec<String> = ebpf.maps().map(|(name, _)| name.to_owned()).collect();
        Maps(names.into_iter().filter_map(|name| ebpf.take_map(&name).map(|map| (name, map))).collect())
    }

    /// Adds one.
    pub fn insert(&mut self, name: &str, map: Map) {
        self.0.insert(name.into(), map);
    }

    /// One of them.
    #[must_use]
    pub fn map(&self, name: &str) -> Option<&Map> {
        self.0.get(name)
    }

    /// One of them, to be written to.
    pub fn map_mut(&mut self, name: &str) -> Option<&mut Map> {
        self.0.get_mut(name)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Map)> {
        self.0.iter().map(|(name, map)| (name.as_str(), map))
    }

    /// The kernel's numbers of those that the aggregator has.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        self.0.values().filter_map(number).collect()
    }

    /// The kernel's number of one of them.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u32> {
        self.map(name).and_then(number)
    }

    /// Entries of one of them.
    #[must_use]
    pub fn entries(&self, name: &str) -> Option<u32> {
        let (Map::Array(data) | Map::PerCpuArray(data)) = self.map(name)? else { return None };
        data.info().ok().map(|info| info.max_entries())
    }
}

fn number(map: &Map) -> Option<u32> {
    let (Map::Array(data) | Map::PerCpuArray(data)) = map else { return None };
    data.info().ok().map(|info| info.id())
}
