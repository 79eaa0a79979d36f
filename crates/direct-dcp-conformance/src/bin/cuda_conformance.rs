//! The suite on a GPU, for machines without cargo: it needs the driver, and nothing else.
//!
//! ```text
//! cuda_conformance [streams|processes] [SCENARIO...]
//! ```
//!
//! Ranks are streams of this process, or processes; without MPS those take turns on the device,
//! some milliseconds for each call. All are on device 0. Without a driver or a device it says so,
//! and succeeds. `DIRECT_DCP_GATHERS`, `DIRECT_DCP_KILLS` and `DIRECT_DCP_SEED` turn it up, or
//! repeat a failure.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{self, Command, ExitCode};
use std::time::{Duration, Instant};

use direct_dcp::Way;
use direct_dcp::cuda::{CudaError, Device, Driver};
use direct_dcp_conformance::backends::{DeviceProcesses, Streams, device_worker};
use direct_dcp_conformance::{Backend, Case, Failure, attempt};

/// The device of all ranks.
const DEVICE: u32 = 0;
/// This very program, even if its file was replaced since it was started.
const SELF: &str = "/proc/self/exe";
/// Says that this process is a rank.
const RANK: &str = "rank";

/// What has to be set before the driver is loaded: a queue for each of 32 streams, for kernels wait
/// for those of other streams; and no multicast, which other programs of a host may be using.
const VARIABLES: [(&str, &str); 2] = [
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ("DIRECT_DCP_DISABLE_MULTICAST", "1"),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if VARIABLES
        .iter()
        .any(|(name, _)| env::var_os(name).is_none())
    {
        let set = |(name, _): &&(&str, &str)| env::var_os(name).is_none();
        let error = Command::new(SELF)
            .args(&arguments)
            .envs(VARIABLES.iter().filter(set).copied())
            .exec();
        eprintln!("cannot start anew with {VARIABLES:?}: {error}");
        return ExitCode::FAILURE;
    }
    if arguments.first().is_some_and(|first| first == RANK) {
        return device_worker(DEVICE);
    }
    if let Err(why) = device() {
        println!("skipped: {why}");
        return ExitCode::SUCCESS;
    }
    let (kind, wanted) = match arguments.split_first() {
        Some((kind, rest)) => (kind.as_str(), rest),
        None => ("streams", [].as_slice()),
    };
    let processes = DeviceProcesses::of(SELF, &[RANK]);
    let backend: &dyn Backend = match kind {
        "streams" => &Streams { device: DEVICE },
        "processes" => &processes,
        other => {
            eprintln!("{other:?} is neither streams nor processes");
            return ExitCode::FAILURE;
        }
    };
    let started = Instant::now();
    let (mut passed, mut failed) = (0, 0);
    let mut tell = |outcome: Result<String, Failure>| match outcome {
        Ok(line) => {
            passed += 1;
            println!("{line}");
        }
        Err(Failure(why)) => {
            failed += 1;
            println!("FAILED: {why}");
        }
    };
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    for scenario in backend.scenarios() {
        if is_wanted(scenario.name) {
            tell(attempt(backend, &scenario));
        }
    }
    if kind == "processes" && is_wanted("kills") {
        tell(kills(&processes));
    }
    println!(
        "{kind}: {passed} scenarios passed, {failed} failed, {:.1?}",
        started.elapsed()
    );
    if failed > 0 || passed == 0 {
        // Ranks that hang are threads that are left behind, perhaps in the driver, whose own end
        // would wait for them.
        process::abort();
    }
    ExitCode::SUCCESS
}

/// Whether there is a device to run on.
fn device() -> Result<(), CudaError> {
    let driver = Driver::load()?;
    let device = Device::new(&driver, DEVICE)?;
    println!("{}, driver {}", device.name()?, driver.version());
    Ok(())
}

/// Ranks that are killed with no chance to say anything: the others name them, and go on.
fn kills(processes: &DeviceProcesses) -> Result<String, Failure> {
    let rounds = env::var("DIRECT_DCP_KILLS").map_or(Ok(6), |text| text.parse::<usize>());
    let rounds = rounds.map_err(|error| Failure(format!("DIRECT_DCP_KILLS: {error}")))?;
    let ways = [Way::Push, Way::Pull, Way::CopyEngine];
    let mut worst = Duration::ZERO;
    for round in 0..rounds {
        let case = Case {
            scenario: "survive".into(),
            world: 3 + round % 2,
            way: ways[round % 3],
            blocks: 1,
            seed: rand::random(),
            amount: 0,
        };
        let victim = round % case.world;
        let after = Duration::from_millis(rand::random_range(0..20));
        let wrong = |why: String| Failure(format!("{case}, rank {victim} killed: {why}"));
        let killed = processes.kill(&case, victim, after);
        let killed = killed.map_err(|Failure(why)| wrong(why))?;
        if !killed.wrong.is_empty() {
            return Err(wrong(format!("blamed by rank, whom: {:?}", killed.wrong)));
        }
        worst = worst.max(killed.latency);
    }
    Ok(format!(
        "{} kills: {rounds}, all survivors knew after {worst:.1?} at most, and went on",
        processes.name()
    ))
}
