//! Rows in device memory, named by address.
#![allow(unsafe_code)] // constructors that make a promise

/// Rows that a launch reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRows {
    address: u64,
    bytes: usize,
}

impl DeviceRows {
    /// `bytes` bytes at the device address `address`.
    ///
    /// # Safety
    /// They are memory that the device of the gather can read, initialised by work that the
    /// gather's stream is ordered after, and neither written nor freed until the gather (each
    /// replay of it, if it was captured) has finished.
    #[must_use]
    pub unsafe fn new(address: u64, bytes: usize) -> Self {
        DeviceRows { address, bytes }
    }

    /// The device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Room for rows that a launch writes.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceRowsMut {
    address: u64,
    bytes: usize,
}

impl DeviceRowsMut {
    /// `bytes` bytes at the device address `address`.
    ///
    /// # Safety
    /// They are memory that the device of the gather can write, and nobody else reads, writes or
    /// frees them until the gather (each replay of it, if it was captured) has finished. They do
    /// not overlap the rows that the gather reads.
    #[must_use]
    pub unsafe fn new(address: u64, bytes: usize) -> Self {
        DeviceRowsMut { address, bytes }
    }

    /// The device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
