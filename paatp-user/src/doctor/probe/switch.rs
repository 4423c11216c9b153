//! Asks a switch for its program.

use std::net::SocketAddr;

use crate::doctor::facts::SwitchFacts;
use crate::switch::client;

pub fn look(address: SocketAddr, device: u64) -> SwitchFacts {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let program = match runtime {
        Ok(runtime) => runtime.block_on(client::look(address, device)).map_err(|error| error.to_string()),
        Err(error) => Err(format!("it cannot be asked: {error}")),
    };
    SwitchFacts { address, program: program.map(|program| (program.slots(), program.lanes())) }
}
