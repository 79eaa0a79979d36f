//! The exported C functions, by the part of the driver they belong to.

mod control;
mod device;
mod graph;
mod memory;
mod module;
mod multicast;
mod stream;
mod vmm;

#[cfg(test)]
mod shape;
