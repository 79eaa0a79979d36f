//! Modules, functions, launches, occupancy.

#![allow(unsafe_code)] // copying kernel arguments, the compiler's log buffers

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::stream::find;
use crate::abi::{In, Out};
use crate::call::export;
use crate::capture::submit;
use crate::code::{Code, Outcome, ensure};
use crate::module::{Entry, Module, Parameter, host, launch, parse, target};
use crate::residency;
use crate::state::{new_handle, require_context, state};
use crate::stream::Kind;

const ERROR_LOG: c_uint = 5;
const ERROR_LOG_BYTES: c_uint = 6;

/// Writes the compiler's log where the options say.
fn write_log(keys: &In<c_uint>, values: &In<*mut c_void>, count: usize, log: &str) -> Outcome {
    let find = |wanted| {
        (0..count)
            .find(|index| keys.at(*index) == Ok(wanted))
            .map(|index| values.at(index))
    };
    if let (Some(buffer), Some(room)) = (find(ERROR_LOG), find(ERROR_LOG_BYTES)) {
        Out(buffer?.cast::<c_char>()).set_text(log, room?.addr())?;
    }
    Ok(())
}

fn load(module: &Out<usize>, image: &In<c_char>, log: impl Fn(&str) -> Outcome) -> Outcome {
    let mut state = state();
    let (context, _) = require_context(&state)?;
    let text = image.text()?;
    let entries = match parse(&text) {
        Ok(entries) => entries,
        Err(text) => {
            log(&text)?;
            return Err(Code::INVALID_PTX);
        }
    };
    let handle = new_handle();
    state.modules.insert(
        handle,
        Module {
            context,
            target: target(&text),
            entries,
            functions: Vec::new(),
        },
    );
    module.set(handle)
}

fn entry(function: usize) -> Outcome<Arc<Entry>> {
    state()
        .functions
        .get(&function)
        .cloned()
        .ok_or(Code::INVALID_HANDLE)
}

/// Registers of each thread of a kernel; few, of one that nothing was said of.
fn registers(entry: &Entry) -> u32 {
    host(entry).map_or(32, |(_, registers)| registers)
}

/// Arguments, copied at the launch.
struct Arguments(Vec<Vec<u128>>);

impl Arguments {
    fn copy(parameters: &[Parameter], pointers: &In<*mut c_void>) -> Outcome<Self> {
        let copy = |(index, parameter): (usize, &Parameter)| {
            let from = pointers.at(index)?.cast::<u8>();
            ensure(!from.is_null(), Code::INVALID_VALUE)?;
            let mut value = vec![0_u128; parameter.bytes.div_ceil(size_of::<u128>())];
            let to = value.as_mut_ptr().cast::<u8>();
            // SAFETY: the caller of a launch gives one value for each parameter, of its size; the
            // copy has at least that size.
            unsafe { core::ptr::copy_nonoverlapping(from, to, parameter.bytes) };
            Ok(value)
        };
        parameters
            .iter()
            .enumerate()
            .map(copy)
            .collect::<Outcome<_>>()
            .map(Self)
    }

    /// Fresh copies for one run, since a kernel may write its arguments.
    fn run(&self, body: impl FnOnce(*mut *mut c_void)) {
        let mut values = self.0.clone();
        let mut pointers: Vec<*mut c_void> = values
            .iter_mut()
            .map(|value| value.as_mut_ptr().cast())
            .collect();
        body(pointers.as_mut_ptr());
    }
}

export! {
    fn cuModuleLoadData(module: Out<usize>, image: In<c_char>) {
        load(&module, &image, |_| Ok(()))
    }
    fn cuModuleLoadDataEx(module: Out<usize>, image: In<c_char>, options: c_uint, keys: In<c_uint>, values: In<*mut c_void>) {
        for index in 0..options as usize {
            ensure(keys.at(index)? < 30, Code::INVALID_VALUE)?;
        }
        load(&module, &image, |text| write_log(&keys, &values, options as usize, text))
    }
    fn cuModuleUnload(module: usize) {
        let mut state = state();
        let (context, _) = require_context(&state)?;
        let found = state.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        ensure(found.context == context, Code::INVALID_CONTEXT)?;
        let module = state.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
        for function in module.functions {
            state.functions.remove(&function);
        }
        Ok(())
    }
    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: In<c_char>) {
        let name = name.text()?;
        let mut state = state();
        let found = state.modules.get_mut(&module).ok_or(Code::INVALID_HANDLE)?;
        let entry = found.entries.iter().find(|(entry, _)| *entry == name).ok_or(Code::NOT_FOUND)?;
        let (context, target, parameters) = (found.context, found.target.clone(), entry.1.clone());
        let handle = new_handle();
        found.functions.push(handle);
        let device = state.device_of(context)?;
        let entry = Entry { context, device, name, target, parameters };
        state.functions.insert(handle, Arc::new(entry));
        function.set(handle)
    }
    fn cuFuncLoad(function: usize) {
        entry(function).map(|_| ())
    }
    fn cuFuncGetParamInfo(function: usize, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        let entry = entry(function)?;
        let parameter = entry.parameters.get(index).ok_or(Code::INVALID_VALUE)?;
        offset.set(parameter.offset)?;
        bytes.set(parameter.bytes)
    }
    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: usize) {
        let entry = entry(function)?;
        value.set(match attribute {
            0 => 1024,
            1 | 3 => 0,
            4 => registers(&entry) as c_int,
            5 | 6 => 90,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<c_int>, function: usize, block: c_int, shared: usize) {
        let entry = entry(function)?;
        ensure((1..=1024).contains(&block), Code::INVALID_VALUE)?;
        let by_threads = 2048 / block;
        let by_registers = residency::REGISTERS / residency::registers_of(block as u32, registers(&entry));
        let by_memory = c_int::try_from((228_usize << 10).checked_div(shared).unwrap_or(32));
        blocks.set(by_threads.min(by_registers as c_int).min(by_memory.unwrap_or(32)).min(32))
    }
    fn cuLaunchKernel(
        function: usize,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: usize,
        parameters: In<*mut c_void>, extra: *mut *mut c_void,
    ) {
        let entry = entry(function)?;
        ensure(extra.is_null() && shared_bytes <= 48 << 10, Code::INVALID_VALUE)?;
        let product = |dimensions: [c_uint; 3]| {
            let all = dimensions.iter().try_fold(1_u32, |all, n| all.checked_mul(*n));
            all.filter(|all| *all > 0).ok_or(Code::INVALID_VALUE)
        };
        let grid = product([grid_x, grid_y, grid_z])?;
        let block = product([block_x, block_y, block_z])?;
        ensure(block <= 1024, Code::INVALID_VALUE)?;
        let Some((host, registers)) = host(&entry) else {
            eprintln!("fake CUDA: no host function is registered for the kernel {}", entry.name);
            return Err(Code::LAUNCH_FAILED);
        };
        let arguments = Arguments::copy(&entry.parameters, &parameters)?;
        let mut state = state();
        let (stream, _) = find(&mut state, stream)?;
        ensure(stream.context == entry.context, Code::INVALID_HANDLE)?;
        let work = move || {
            launch(entry.device, registers, || arguments.run(|pointers| host(pointers, grid, block)))
        };
        submit(&state, &stream, Arc::new(work), Kind::Ordinary)
    }
}
