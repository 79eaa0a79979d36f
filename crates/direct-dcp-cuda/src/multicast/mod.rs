//! Multicast objects: one address whose stores reach a replica on every device of a team.
//!
//! The order matters across all ranks, and the driver enforces part of it by blocking without a
//! deadline: a bind, and a map, wait until every device has been added. So the types here follow
//! the life of the object, and the two barriers between ranks are the caller's to keep:
//!
//! ```text
//! rank 0          MulticastObject::create, export_fd, send to every rank
//! other ranks     MulticastObject::import_fd
//! every rank      add_device
//!                 -------- BARRIER: every rank has added its device --------
//! every rank      complete() -> MulticastTeam, bind its own memory
//! every rank      bound() -> BoundMulticast
//!                 -------- BARRIER: every rank has bound its memory --------
//! every rank      map -> Mapping, used by multimem instructions only
//! ```
//!
//! and down again, where the order within a rank is kept by what holds what:
//!
//! ```text
//!                 -------- BARRIER: no rank stores through the mapping any more --------
//! every rank      unmap  ->  unbind  ->  release the object, release the memory
//! ```
//!
//! If one rank fails before the first barrier, the others must not go on to bind: they would wait
//! for a device that never comes. Vote at each barrier.
//!
//! The addresses of a multicast mapping and of the replicas behind it are aliases; in a kernel only
//! a proxy fence orders them.

mod bound;
mod object;
mod team;

pub use bound::BoundMulticast;
pub use object::MulticastObject;
pub use team::MulticastTeam;
