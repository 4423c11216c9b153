//! Who is what number where, if all ranks of a node are one rank of its parent's job.

use paatp_common::levels::Link;
use paatp_transport::{Names, Seating};

use crate::common::NONCE;
use crate::tree::Plan;

/// What a bit of a site's packets stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    Rank(usize),
    Site(usize),
}

/// The seats of a site, in order: its own ranks, then the sites below that have any.
pub fn seats(plan: &Plan, site: usize) -> Vec<Seat> {
    let ranks = (0..plan.homes.len()).filter(|rank| plan.homes[*rank] == site).map(Seat::Rank);
    let sites = (0..plan.parents.len()).filter(|below| plan.parents[*below] == Some(site));
    ranks.chain(sites.filter(|below| count(plan, Seat::Site(*below)) > 0).map(Seat::Site)).collect()
}

fn count(plan: &Plan, seat: Seat) -> u16 {
    match seat {
        Seat::Rank(_) => 1,
        Seat::Site(site) => seats(plan, site).into_iter().map(|seat| count(plan, seat)).sum(),
    }
}

/// The path of seats from the root to a site, with their numbers.
fn path(plan: &Plan, site: usize) -> Vec<(usize, u8)> {
    let Some(parent) = plan.parents[site] else { return Vec::new() };
    let mut path = path(plan, parent);
    // A site without ranks has none.
    let seat = seats(plan, parent).iter().position(|seat| *seat == Seat::Site(site));
    path.extend(seat.map(|seat| (parent, seat as u8)));
    path
}

/// Whom the bits of a site stand for.
pub fn names(plan: &Plan, site: usize) -> Names {
    let first = path(plan, site).into_iter().map(|(above, seat)| {
        seats(plan, above).into_iter().take(seat.into()).map(|seat| count(plan, seat)).sum::<u16>()
    });
    let beneath: Vec<u16> = seats(plan, site).into_iter().map(|seat| count(plan, seat)).collect();
    Names::new(first.sum(), &beneath).expect("few ranks")
}

/// The number of a rank at its home, and what it is told of the others.
pub fn seating(plan: &Plan, rank: usize) -> (u8, Seating) {
    let home = plan.homes[rank];
    let own = seats(plan, home).iter().position(|seat| *seat == Seat::Rank(rank)).expect("a seat") as u8;
    let seat = path(plan, home).first().map_or(own, |(_, seat)| *seat);
    (own, Seating { here: names(plan, home), root: names(plan, 0), seat })
}

/// With what a site's link is completed.
pub fn link(plan: &Plan, site: usize, link: Link) -> Link {
    let Some((_, seat)) = path(plan, site).last().copied() else { return link };
    let root = names(plan, 0);
    let keys = (0..root.bits()).fold(0u64, |sum, bit| sum.wrapping_add(root.key(NONCE, bit)));
    Link { child: seat + 1, seats: root.bits(), keys, ..link }
}
