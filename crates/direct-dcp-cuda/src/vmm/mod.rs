//! Virtual memory: memory that several devices and several processes see.
//!
//! Three objects, as the driver has them: physical memory ([`Allocation`]), a range of addresses
//! ([`AddressRange`]) and the one seen through the other ([`Mapping`]). A mapping holds the other
//! two, so the teardown is in the only right order whatever the caller drops first:
//!
//! ```text
//! unmap  ->  release the memory  ->  free the addresses
//! ```
//!
//! Only memory created here for the purpose is ever exported, never a caller's.

mod allocation;
mod mapping;
mod range;
mod share;

pub use allocation::{Allocation, Granularity};
pub use mapping::Mapping;
pub use range::AddressRange;
pub use share::{FabricHandle, HandleTypes};

pub(crate) use mapping::Backing;
pub(crate) use share::{export_fabric, export_fd, import_fabric, import_fd};
