//! Finding and steering the fake from a Rust test.

#![allow(unsafe_code)] // calling the library's C functions

use core::ffi::{c_char, c_int, c_void};
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// The type of a kernel's host function: arguments as the launch got them, blocks, threads of each.
pub type Kernel = extern "C" fn(params: *mut *mut c_void, grid: u32, block: u32);

/// What a planned failure does to a call that gives something back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailMode {
    /// It gives it back and reports a failure, as a driver that passes on an earlier error.
    AfterRelease,
    /// It does nothing and reports a failure.
    Refuse,
}

/// The file of the shared library, which Cargo builds for every crate that has this one as a
/// dependency: beside the running test, or one folder up.
///
/// # Panics
/// If it is not there.
pub fn library_path() -> PathBuf {
    let name = format!(
        "{}direct_dcp_fake_cuda{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    let program = std::env::current_exe().expect("the path of the running program");
    let folders = program.ancestors().skip(1).take(3);
    let places = folders.flat_map(|folder| [folder.join(&name), folder.join("deps").join(&name)]);
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("no {name} in {:?}", places.collect::<Vec<_>>()))
}

/// A handle on the fake that is opened in this process.
///
/// It is the same library as the one that the code under test opens from the same path, so what is
/// counted and planned here is its.
#[derive(Debug)]
pub struct Fake {
    library: libloading::Library,
    path: PathBuf,
}

type Report = unsafe extern "C" fn(*mut c_char, usize) -> usize;

impl Fake {
    /// Opens the library.
    ///
    /// # Panics
    /// If it is not built.
    pub fn open() -> Self {
        Self::open_at(library_path())
    }

    /// Opens the library in this file.
    ///
    /// # Panics
    /// If it cannot be opened.
    pub fn open_at(path: PathBuf) -> Self {
        // SAFETY: our own library, whose initialisers do nothing.
        let library = unsafe { libloading::Library::new(&path) }.expect("the fake driver");
        Self { library, path }
    }

    /// The file, for the variable that names the driver to open.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: each caller names the type that `api/control.rs` gives the function.
        let symbol = unsafe { self.library.get::<T>(name.as_bytes()) };
        *symbol.expect("a function of the fake driver")
    }

    fn text(&self, name: &str) -> String {
        let function: Report = self.symbol(name);
        let mut buffer = vec![0_u8; 256];
        loop {
            // SAFETY: writes at most as many bytes as the buffer has.
            let needed = unsafe { function(buffer.as_mut_ptr().cast(), buffer.len()) };
            if needed <= buffer.len() {
                buffer.truncate(needed - 1);
                return String::from_utf8(buffer).expect("text");
            }
            buffer.resize(needed, 0);
        }
    }

    /// How many things have not been given back.
    pub fn outstanding(&self) -> u64 {
        let function: extern "C" fn() -> u64 = self.symbol("fakeCudaOutstanding");
        function()
    }

    /// What has not been given back, as `streams=1 events=2`.
    pub fn report(&self) -> String {
        self.text("fakeCudaReport")
    }

    /// Makes the `k`-th driver call from now fail; see `fakeCudaFail`.
    pub fn fail(&self, symbol: Option<&str>, k: u64, code: i32, mode: FailMode) {
        let function: unsafe extern "C" fn(*const c_char, u64, c_int, c_int) =
            self.symbol("fakeCudaFail");
        let symbol = symbol.map(|symbol| CString::new(symbol).expect("a C name"));
        let name = symbol
            .as_ref()
            .map_or(core::ptr::null(), |symbol| symbol.as_ptr());
        // SAFETY: null or a C string that lives through the call.
        unsafe { function(name, k, code, c_int::from(mode == FailMode::Refuse)) };
    }

    /// The function that the plan made fail, if it has come to that.
    pub fn failed(&self) -> Option<String> {
        Some(self.text("fakeCudaFailed")).filter(|name| !name.is_empty())
    }

    /// How many driver calls there have been.
    pub fn calls(&self) -> u64 {
        let function: extern "C" fn() -> u64 = self.symbol("fakeCudaCalls");
        function()
    }

    /// The names of the calls since [`Fake::clear_log`], with their codes.
    pub fn log(&self) -> Vec<(String, i32)> {
        let parse = |line: &str| {
            let (name, code) = line.split_once(' ')?;
            Some((name.to_owned(), code.parse().ok()?))
        };
        self.text("fakeCudaLog").lines().filter_map(parse).collect()
    }

    /// Forgets the calls so far.
    pub fn clear_log(&self) {
        let function: extern "C" fn() = self.symbol("fakeCudaClearLog");
        function();
    }

    /// How many contexts this thread has pushed and not popped.
    pub fn context_depth(&self) -> usize {
        let function: extern "C" fn() -> usize = self.symbol("fakeCudaContextDepth");
        function()
    }

    /// Registers the host function of a kernel, for launches from now on: of the entry point of
    /// this name in any module, or, where the name is `entry@target`, in modules for that target.
    /// Each of its threads has so many registers.
    pub fn register_kernel(&self, name: &str, kernel: Kernel, registers: u32) {
        let function: unsafe extern "C" fn(*const c_char, Kernel, u32) -> c_int =
            self.symbol("fakeCudaRegisterKernel");
        let name = CString::new(name).expect("a C name");
        // SAFETY: a C string that lives through the call, and a function.
        let code = unsafe { function(name.as_ptr(), kernel, registers) };
        assert_eq!(code, 0, "the kernel was not registered");
    }

    /// The device on which the calling kernel runs: known on the thread that the driver calls it on.
    pub fn launch_device(&self) -> Option<u32> {
        let function: extern "C" fn() -> c_int = self.symbol("fakeCudaLaunchDevice");
        u32::try_from(function()).ok()
    }

    /// Waits until all blocks of the calling kernel are resident, one after another, as one whose
    /// blocks wait for each other needs them; they stay until what is returned is dropped.
    pub fn reside(&self, blocks: u32, threads: u32) -> Resident<'_> {
        let function: extern "C" fn(u32, u32) -> u64 = self.symbol("fakeCudaReside");
        Resident {
            fake: self,
            ticket: function(blocks, threads),
        }
    }

    /// Makes the calling kernel's launch end with a code: nothing more runs on its stream.
    pub fn fail_launch(&self, code: i32) {
        let function: extern "C" fn(c_int) = self.symbol("fakeCudaFailLaunch");
        function(code);
    }

    /// Where the replicas behind a multicast span lie, or the code; see
    /// `fakeCudaMulticastReplicas`.
    ///
    /// # Errors
    /// The `CUresult`.
    pub fn multicast_replicas(&self, address: u64, bytes: usize) -> Result<Vec<*mut u8>, i32> {
        let function: unsafe extern "C" fn(u64, usize, *mut *mut c_void, usize) -> c_int =
            self.symbol("fakeCudaMulticastReplicas");
        let mut found = [core::ptr::null_mut(); 16];
        // SAFETY: writes at most as many pointers as the array has.
        let count = unsafe { function(address, bytes, found.as_mut_ptr(), found.len()) };
        let count = usize::try_from(count).map_err(|_| -count)?;
        Ok(found[..count]
            .iter()
            .map(|pointer| pointer.cast())
            .collect())
    }

    /// Whether a kernel on a device may read, or write, a span.
    pub fn may_access(&self, device: u32, address: u64, bytes: usize, write: bool) -> bool {
        let function: extern "C" fn(u32, u64, usize, c_int) -> c_int =
            self.symbol("fakeCudaCheckAccess");
        function(device, address, bytes, c_int::from(write)) == 0
    }
}

/// Blocks that are resident; see [`Fake::reside`].
#[derive(Debug)]
pub struct Resident<'a> {
    fake: &'a Fake,
    ticket: u64,
}

impl Drop for Resident<'_> {
    fn drop(&mut self) {
        let function: extern "C" fn(u64) = self.fake.symbol("fakeCudaLeave");
        function(self.ticket);
    }
}
