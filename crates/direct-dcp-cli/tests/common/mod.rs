//! What the tests of the program share: running it under a watchdog, and making its input.
#![allow(dead_code, reason = "each test program uses some of it")]

use safetensors::tensor::{Dtype, TensorView};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Long after which the program hangs. Never a bound on how long it may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// Standard output of a run that has to succeed without a complaint.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert!(self.status.success() && self.stderr.is_empty(), "{self:?}");
        self.stdout
    }
}

pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_direct-dcp"));
    // No test finds a real GPU, or settings of one, by chance.
    command.env("DIRECT_DCP_LIBCUDA", "/no/such/libcuda.so");
    for name in [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "DIRECT_DCP_DISABLE_MULTICAST",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
        "NCCL_NVLS_ENABLE",
    ] {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(crate) fn run<S: AsRef<str>>(args: &[S]) -> Ended {
    let mut command = command();
    finish(
        command
            .args(args.iter().map(AsRef::as_ref))
            .spawn()
            .unwrap(),
    )
}

/// Runs with fake GPUs that have the kernels, and succeeds without a complaint.
#[track_caller]
pub(crate) fn on_gpus(devices: &str, args: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = command();
    command.args(args).env("DIRECT_DCP_FAKE_DEVICES", devices);
    command.envs(direct_dcp_fake_gpu::variables());
    for (name, value) in variables {
        command.env(name, value);
    }
    finish(command.spawn().unwrap()).success()
}

/// Waits for the program, and reads what it prints meanwhile.
pub(crate) fn finish(mut child: Child) -> Ended {
    fn reader(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
        thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut from) = from {
                from.read_to_string(&mut text).unwrap();
            }
            text
        })
    }
    let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let status = wait(&mut child);
    Ended {
        status,
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("the program hangs");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until something holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "never {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The example data that comes with the project.
pub(crate) fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/minilm_kv_small.safetensors")
}

/// A file of the larger data, where somebody says where that is.
pub(crate) fn larger_data(file: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("DIRECT_DCP_DATA");
    if folder.is_none() {
        println!("skipped: DIRECT_DCP_DATA does not name a directory with {file}");
    }
    Some(PathBuf::from(folder?).join(file))
}

/// Bytes that do not repeat.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(step).collect()
}

/// Writes a file with one tensor.
pub(crate) fn write_tensor(path: &Path, name: &str, dtype: Dtype, shape: &[usize], data: &[u8]) {
    let view = TensorView::new(dtype, shape.to_vec(), data).unwrap();
    fs::write(path, safetensors::serialize([(name, view)], None).unwrap()).unwrap();
}

/// Whether `output` holds just the tensor `name`, as it is in `input`.
#[track_caller]
pub(crate) fn assert_same_tensor(input: &Path, output: &Path, name: &str) {
    let (input, output) = (fs::read(input).unwrap(), fs::read(output).unwrap());
    let input = safetensors::SafeTensors::deserialize(&input).unwrap();
    let output = safetensors::SafeTensors::deserialize(&output).unwrap();
    assert_eq!(output.names(), [name]);
    let (input, output) = (input.tensor(name).unwrap(), output.tensor(name).unwrap());
    assert_eq!(
        (input.dtype(), input.shape()),
        (output.dtype(), output.shape())
    );
    assert!(input.data() == output.data(), "other bytes");
}

/// What is in a directory.
pub(crate) fn listing(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}
