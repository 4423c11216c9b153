//! A lower node asks its parent, as a worker would, on behalf of its ranks.

use std::time::{Duration, Instant};

use paatp_common::levels::Link;
use paatp_transport::words::Span;
use serde::Serialize;
use ureq::http::Method;

use crate::cli::Credentials;
use crate::client::{Server, escape};
use crate::worker::Endpoint;
use crate::worker::xdp::route::Way;

use super::ascent::{Ascent, Uplink};
use super::error::{Code, ControlError};
use super::membership::{Parent, table_address};
use super::protocol::{Grant, JoinRequest, LeaveRequest, PROTOCOL, Problem};

/// Longer than the parent may take to say that the wait is over.
const GRACE: Duration = Duration::from_secs(5);

/// Longest wait of one request. A parent that has lost its power says nothing, and its successor knows nothing of those that
/// were asked before.
const PIECE: Duration = Duration::from_secs(30);

/// Time for a parent to note that one rank leaves.
const LEAVE_TIME: Duration = Duration::from_secs(5);

/// Joins the parent for all ranks of this node, and finds the way to it. Takes as long as the ranks of other nodes do.
///
/// # Errors
/// If it refuses or cannot be reached.
pub(super) fn join(ascent: &Ascent) -> Result<(Grant, Uplink), ControlError> {
    let until = Instant::now() + ascent.wait;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match join_for(ascent, left.min(PIECE)) {
            Err(ControlError::RanksMissing { .. } | ControlError::NodesMissing { .. }) if left > PIECE => {}
            joined => return joined,
        }
    }
}

/// The same, but for no longer than this.
fn join_for(ascent: &Ascent, wait: Duration) -> Result<(Grant, Uplink), ControlError> {
    let ranks = ascent.parent.ranks;
    let request = JoinRequest {
        protocol: PROTOCOL,
        rank: ascent.parent.child.unwrap_or(ranks.first()).into(),
        world: ascent.world.into(),
        wait_seconds: wait.as_secs_f64(),
        layout: ascent.layout.clone(),
        attempt: None,
        below: (ascent.parent.child.is_none())
            .then(|| (ranks.first() + 1..=ranks.last()).map(u32::from).collect()),
        members: ascent.parent.child.map(|_| ascent.world.into()),
    };
    let refused = |why| ControlError::Parent { job: ascent.name.clone(), parent: ascent.parent.address, why };
    let (status, body) = ask(ascent.parent, &ascent.name, "join", &request, wait + GRACE).map_err(refused)?;
    if status != 200 {
        return Err(match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) if problem.code == Code::RANKS_MISSING.name() => {
                let (waited, missing) = (Span(ascent.wait).to_string(), problem.missing_ranks);
                match ascent.parent.child {
                    // Ranks there have other names than those here.
                    Some(_) => ControlError::NodesMissing { parent: ascent.parent.address, waited, missing },
                    None => ControlError::RanksMissing { world: ascent.world.into(), waited, missing },
                }
            }
            Ok(problem) => refused(format!("refuses: {}", problem.detail)),
            Err(_) => {
                refused(format!("answers with HTTP status {status}, as no aggregator of this version does"))
            }
        });
    }
    let grant: Grant = serde_json::from_slice(&body)
        .map_err(|error| refused(format!("grants what cannot be read: {error}")))?;
    let way =
        Way::find(ascent.parent.address).map_err(|error| refused(format!("cannot be sent to: {error}")))?;
    let nodes = grant.nodes.as_ref().filter(|_| ascent.parent.child.is_some());
    let link = Link {
        child: ascent.parent.child.map_or(0, |child| child + 1),
        seats: if nodes.is_some() { grant.world } else { 0 },
        keys: nodes.map_or(0, |nodes| nodes.keys(grant.nonce)),
        parent: table_address(ascent.parent.address.ip()),
        mac: way.destination,
        port_base: grant.port_base,
        ports: grant.ports,
        number: grant.job,
        ..Link::default()
    };
    Ok((grant, Uplink { interface: way.interface, link }))
}

/// Leaves for all ranks of this node. What cannot be said is left to the parent's timeout.
///
/// # Errors
/// Why the parent does not know it now, in words.
pub(super) fn leave(parent: Parent, name: &str, generation: u32) -> Result<(), String> {
    let ranks = match parent.child {
        Some(child) => child..=child,
        None => parent.ranks.first()..=parent.ranks.last(),
    };
    for rank in ranks {
        let request = LeaveRequest { protocol: PROTOCOL, rank: rank.into(), generation: Some(generation) };
        let (status, body) = ask(parent, name, "leave", &request, LEAVE_TIME)?;
        if status != 204 {
            let detail = serde_json::from_slice::<Problem>(&body).map(|problem| problem.detail);
            return Err(format!("refuses: {}", detail.unwrap_or_else(|_| format!("HTTP status {status}"))));
        }
    }
    Ok(())
}

fn ask(
    parent: Parent,
    name: &str,
    what: &str,
    request: &impl Serialize,
    deadline: Duration,
) -> Result<(u16, Vec<u8>), String> {
    let endpoint = Endpoint { text: parent.address.to_string(), address: parent.address };
    let server = Server::new(endpoint, &Credentials::default()).map_err(|error| error.to_string())?;
    let path = format!("/v1/jobs/{}/{what}", escape(name));
    server
        .ask(Method::POST, &path, Some(request), deadline)
        .map_err(|error| format!("does not answer ({error}); is `paatp run --levels` running there?"))
}
