//! Modules: PTX compiled by the driver.

#![allow(unsafe_code)] // driver calls

use core::ffi::{CStr, c_uint, c_void};
use std::ffi::CString;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::SymbolGroup;
use crate::error::{CudaError, Result};
use crate::function::Function;
use crate::sys;

/// Bytes kept of each of the compiler's logs.
const LOG_BYTES: usize = 16 * 1024;

/// PTX that the driver has compiled for the context's device. Unloaded on drop.
#[derive(Debug)]
pub struct Module {
    context: Context,
    raw: sys::CUmodule,
    log: String,
    /// Entry points, each with the number of its parameters.
    entries: Vec<(String, usize)>,
}

impl Module {
    /// Compiles PTX text.
    ///
    /// # Errors
    /// [`CudaError::Jit`] with the compiler's log where it refuses the text,
    /// [`CudaError::InvalidArgument`] for a NUL inside it, else the driver's.
    pub fn load_ptx(context: &Context, ptx: &str) -> Result<Arc<Self>> {
        let image = CString::new(ptx).map_err(|error| {
            let got = format!("a NUL at byte {}", error.nul_position());
            CudaError::invalid("ptx", "text without NUL", got)
        })?;
        context.with_current(|| Self::compile(context, &image, entries(ptx)))
    }

    fn compile(
        context: &Context,
        image: &CStr,
        entries: Vec<(String, usize)>,
    ) -> Result<Arc<Self>> {
        let mut errors = vec![0_u8; LOG_BYTES];
        let mut notes = vec![0_u8; LOG_BYTES];
        // The driver takes pointers and integers alike as the bits of a pointer.
        let room = core::ptr::without_provenance_mut::<c_void>(LOG_BYTES);
        let mut keys: [c_uint; 4] = [
            sys::CU_JIT_ERROR_LOG_BUFFER,
            sys::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            sys::CU_JIT_INFO_LOG_BUFFER,
            sys::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [
            errors.as_mut_ptr().cast::<c_void>(),
            room,
            notes.as_mut_ptr().cast(),
            room,
        ];
        let mut raw = sys::CUmodule::NULL;
        // SAFETY: the image ends in NUL, as PTX must; the four options come with the values that
        // the header asks for, the two buffers have the sizes named beside them, and all of it
        // lives through the call.
        let outcome = unsafe {
            context.driver().api().cuModuleLoadDataEx(
                &mut raw,
                image.as_ptr().cast(),
                4,
                keys.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        match outcome {
            Ok(()) => Ok(Arc::new(Self {
                context: context.clone(),
                raw,
                log: text(&notes),
                entries,
            })),
            Err(CudaError::Driver {
                code,
                name,
                message,
                ..
            }) if (200..300).contains(&code) => {
                let log = text(&errors);
                let log = if log.is_empty() { message } else { log };
                Err(CudaError::Jit { code, name, log })
            }
            Err(error) => Err(error),
        }
    }

    /// Finds an entry point by the name in the PTX.
    ///
    /// It is loaded here, not by its first launch: for that the driver may wait until the device
    /// is idle, which a kernel that waits for a peer keeps it from.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` where there is no such entry.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let c_name = CString::new(name)
            .map_err(|_| CudaError::invalid("function name", "text without NUL", name))?;
        self.context.with_current(|| {
            let mut raw = sys::CUfunction::NULL;
            let api = self.context.driver().api();
            // SAFETY: the module is live, the name ends in NUL; writes one handle.
            unsafe { api.cuModuleGetFunction(&mut raw, self.raw, c_name.as_ptr()) }?;
            if self.context.driver().has(SymbolGroup::Functions) {
                // SAFETY: the function was found just now.
                unsafe { api.cuFuncLoad(raw) }?;
            }
            let is_it = |(entry, _): &&(String, usize)| entry == name;
            let parameters = self.entries.iter().find(is_it).map(|(_, count)| *count);
            Function::new(self, raw, parameters)
        })
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What the compiler had to say; usually empty.
    pub fn log(&self) -> &str {
        &self.log
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            // SAFETY: loaded by `load_ptx`, unloaded only here; every `Function` holds the `Arc`
            // around `self`, so none is left.
            driver.released(unsafe { driver.api().cuModuleUnload(self.raw) });
        }
    }
}

/// The entry points of a PTX text, each with the number of its parameters. The driver tells their
/// sizes, but to ask it for one more than there are is an error that memory checkers report.
fn entries(ptx: &str) -> Vec<(String, usize)> {
    let declared = ptx.split(".entry").skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_once('(')?;
        let (list, _) = rest.split_once(')')?;
        Some((name.trim().to_owned(), list.matches(".param").count()))
    });
    declared.collect()
}

fn text(log: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(log)
        .map(CStr::to_string_lossy)
        .unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use direct_dcp_kernels::device::{GATHER_ENTRIES, UNICAST_PTX};

    use super::entries;

    #[test]
    fn parameters_are_counted() {
        let ptx = ".visible .entry one(.param .u64 .ptr .align 4 a,\n .param .u32 b)\n{ ret; }\n\
            .visible .entry none() { ret; }\n.entry two (\n.param .b8 two_param_0[160]\n)\n{}";
        let counted = [("one", 2), ("none", 0), ("two", 1)];
        assert_eq!(
            entries(ptx),
            counted.map(|(name, count)| (name.into(), count))
        );
        let gathers = entries(UNICAST_PTX);
        for (_, _, name) in GATHER_ENTRIES {
            assert!(gathers.contains(&(name.into(), 1)), "{name}");
        }
    }
}
