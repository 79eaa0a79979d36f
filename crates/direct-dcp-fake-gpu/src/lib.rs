//! The fake driver with its gather kernels, for programs that are run and not linked by a test.
//!
//! A test's own code registers kernels by calling [`direct_dcp_fake_kernels::register`]. A program
//! knows nothing of the fake, so this library does it when the program is started with
//!
//! ```text
//! LD_PRELOAD=…/libdirect_dcp_fake_gpu.so DIRECT_DCP_LIBCUDA=…/libdirect_dcp_fake_cuda.so
//! ```
//!
//! as [`variables`] has it; the processes that the program starts inherit both.

#![allow(unsafe_code)] // a function that runs when the library is loaded

use std::env;
use std::path::PathBuf;

use direct_dcp_fake_cuda::{Fake, library_path};

/// Names the driver to open.
const DRIVER: &str = "DIRECT_DCP_LIBCUDA";
/// Names the libraries to preload.
const PRELOAD: &str = "LD_PRELOAD";
/// This library.
const FILE: &str = "libdirect_dcp_fake_gpu.so";

/// The environment in which a program has fake GPUs.
///
/// # Panics
/// If the libraries are not built.
#[must_use]
pub fn variables() -> [(&'static str, PathBuf); 2] {
    let driver = library_path();
    let folders = driver.ancestors().skip(1).take(2);
    let places = folders.flat_map(|folder| [folder.join(FILE), folder.join("deps").join(FILE)]);
    let preload = places.clone().find(|place| place.is_file());
    let preload = preload.unwrap_or_else(|| panic!("none of {:?}", places.collect::<Vec<_>>()));
    [(PRELOAD, preload), (DRIVER, driver)]
}

extern "C" fn register() {
    // What links this library, for `variables`, has not preloaded it.
    let preloaded = env::var_os(PRELOAD).is_some_and(|list| list.to_string_lossy().contains(FILE));
    if let (true, Some(driver)) = (preloaded, env::var_os(DRIVER)) {
        let fake = Fake::open_at(driver.into());
        direct_dcp_fake_kernels::register(&fake);
        // Closed, the driver would forget them.
        std::mem::forget(fake);
    }
}

// SAFETY: the loader calls the functions of this section, with arguments that this one ignores.
#[unsafe(link_section = ".init_array")]
#[used]
static REGISTER: extern "C" fn() = register;
