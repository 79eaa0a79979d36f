//! Kernels: their attributes, their occupancy, their launch.

#![allow(unsafe_code)] // driver calls

use core::ffi::{c_int, c_uint, c_void};
use core::marker::PhantomData;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::SymbolGroup;
use crate::error::{CudaError, Result};
use crate::module::Module;
use crate::stream::Stream;
use crate::sys;

/// The most parameters a launch may have.
pub const MAX_PARAMETERS: usize = 32;

/// An entry point of a [`Module`], which it keeps loaded.
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
    /// Size of each parameter, where the driver tells (CUDA 12.4).
    parameters: Option<Arc<[usize]>>,
}

/// What the compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionAttributes {
    /// Registers of each thread.
    pub registers: i32,
    /// Bytes of local memory of each thread: above zero, something spilled.
    pub local_bytes: i32,
    /// Bytes of static shared memory of each block.
    pub shared_bytes: i32,
    /// Threads that a block may have.
    pub max_threads_per_block: i32,
    /// The virtual architecture that the PTX names as its target: 80 is sm_80.
    pub ptx_version: i32,
    /// The architecture it was compiled for: 90 is sm_90.
    pub binary_version: i32,
}

/// The shape of a launch: blocks, threads of each block, dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks, in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of each block.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// A one-dimensional launch without dynamic shared memory.
    pub fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// One argument of a kernel: any plain value, borrowed for the time of the launch call.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    pointer: *const c_void,
    bytes: usize,
    value: PhantomData<&'a ()>,
}

impl<'a> Param<'a> {
    /// Refers to a value; a device address is a `u64`. The driver copies the value during the call.
    pub fn new<T: Copy>(value: &'a T) -> Self {
        let pointer = core::ptr::from_ref(value).cast();
        Self {
            pointer,
            bytes: size_of::<T>(),
            value: PhantomData,
        }
    }
}

impl Function {
    /// An entry point with so many parameters; without the number, launches are not checked.
    pub(crate) fn new(
        module: &Arc<Module>,
        raw: sys::CUfunction,
        parameters: Option<usize>,
    ) -> Result<Self> {
        let sizes = parameters.map(|count| parameter_sizes(module.context(), raw, count));
        let parameters = sizes.transpose()?.flatten();
        Ok(Self {
            module: Arc::clone(module),
            raw,
            parameters,
        })
    }

    /// The module.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// What the compiler made of the kernel.
    ///
    /// # Errors
    /// The driver's.
    pub fn attributes(&self) -> Result<FunctionAttributes> {
        let context = self.module.context();
        context.with_current(|| {
            let ask = |attribute| {
                let mut value = 0;
                let api = context.driver().api();
                // SAFETY: the function is live while its module is; writes one integer.
                unsafe { api.cuFuncGetAttribute(&mut value, attribute, self.raw) }?;
                Ok(value)
            };
            Ok(FunctionAttributes {
                registers: ask(sys::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
                local_bytes: ask(sys::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
                shared_bytes: ask(sys::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
                max_threads_per_block: ask(sys::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
                ptx_version: ask(sys::CU_FUNC_ATTRIBUTE_PTX_VERSION)?,
                binary_version: ask(sys::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
            })
        })
    }

    /// How many blocks of this size one multiprocessor holds at once. Times the number of
    /// multiprocessors it bounds the blocks that are certain to be resident on an idle device.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for zero or too many threads, [`CudaError::SymbolMissing`]
    /// from an old driver, else the driver's.
    pub fn max_active_blocks_per_multiprocessor(
        &self,
        threads: u32,
        shared_bytes: usize,
    ) -> Result<u32> {
        let block = match c_int::try_from(threads) {
            Ok(block) if block > 0 => block,
            _ => {
                return Err(CudaError::invalid(
                    "threads of a block",
                    "at least 1",
                    threads,
                ));
            }
        };
        let context = self.module.context();
        context.with_current(|| {
            let mut blocks: c_int = 0;
            // SAFETY: the function is live while its module is; writes one integer.
            unsafe {
                context
                    .driver()
                    .api()
                    .cuOccupancyMaxActiveBlocksPerMultiprocessor(
                        &mut blocks,
                        self.raw,
                        block,
                        shared_bytes,
                    )
            }?;
            Ok(blocks.unsigned_abs())
        })
    }

    /// Submits the kernel to a stream.
    ///
    /// The number and the sizes of the arguments are checked where the driver tells them (CUDA
    /// 12.4); their meaning cannot be. No memory is allocated.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for an empty shape, a stream of another context or arguments
    /// that do not match, else the driver's. Nothing was launched then.
    ///
    /// # Safety
    /// The arguments are what the kernel expects, by number, type and meaning; memory that it
    /// reads and writes is accessible to the stream's context until it has finished (or, when
    /// captured, at each replay), and nobody else touches it meanwhile without ordering.
    pub unsafe fn launch(
        &self,
        shape: LaunchShape,
        stream: &Stream,
        params: &[Param<'_>],
    ) -> Result<()> {
        self.check_launch(shape, stream, params)?;
        let mut pointers = [core::ptr::null_mut::<c_void>(); MAX_PARAMETERS];
        for (slot, param) in pointers.iter_mut().zip(params) {
            *slot = param.pointer.cast_mut(); // the driver only reads
        }
        let LaunchShape {
            grid,
            block,
            shared_bytes,
        } = shape;
        let context = self.module.context();
        context.with_current(|| {
            // SAFETY: function and stream are live and of one context; there are as many pointers
            // as parameters, each to a value that is borrowed through the call, in which the
            // driver copies it; the caller vouches for what the kernel does with them.
            unsafe {
                context.driver().api().cuLaunchKernel(
                    self.raw,
                    grid[0],
                    grid[1],
                    grid[2],
                    block[0],
                    block[1],
                    block[2],
                    shared_bytes,
                    stream.raw(),
                    pointers.as_mut_ptr(),
                    core::ptr::null_mut(),
                )
            }
        })
    }

    fn check_launch(
        &self,
        shape: LaunchShape,
        stream: &Stream,
        params: &[Param<'_>],
    ) -> Result<()> {
        if shape.grid.contains(&0) || shape.block.contains(&0) {
            let got = format!("{shape:?}");
            return Err(CudaError::invalid(
                "launch shape",
                "at least 1 in each dimension",
                got,
            ));
        }
        if stream.context() != self.module.context() {
            let expected = "a stream of the module's context";
            return Err(CudaError::invalid(
                "stream",
                expected,
                "a stream of another context",
            ));
        }
        if params.len() > MAX_PARAMETERS {
            let expected = format!("at most {MAX_PARAMETERS}");
            return Err(CudaError::invalid(
                "kernel arguments",
                expected,
                params.len(),
            ));
        }
        if let Some(sizes) = &self.parameters
            && !sizes
                .iter()
                .copied()
                .eq(params.iter().map(|param| param.bytes))
        {
            let got: Vec<usize> = params.iter().map(|param| param.bytes).collect();
            let expected = format!("arguments of {sizes:?} bytes");
            return Err(CudaError::invalid(
                "kernel arguments",
                expected,
                format!("{got:?}"),
            ));
        }
        Ok(())
    }
}

/// The sizes of a function's parameters, where the driver tells.
fn parameter_sizes(
    context: &Context,
    function: sys::CUfunction,
    count: usize,
) -> Result<Option<Arc<[usize]>>> {
    if !context.driver().has(SymbolGroup::Functions) {
        return Ok(None);
    }
    let sizes = (0..count).map(|index| {
        let (mut offset, mut bytes) = (0, 0);
        let api = context.driver().api();
        // SAFETY: the function is live; writes two integers to places that live through the call.
        unsafe { api.cuFuncGetParamInfo(function, index, &mut offset, &mut bytes) }?;
        Ok(bytes)
    });
    sizes.collect::<Result<_>>().map(Some)
}

const _: () = assert!(size_of::<c_uint>() == size_of::<u32>());
