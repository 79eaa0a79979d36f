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
use direct_dcp::cuda::{Context, CudaError, Device, Driver};
use direct_dcp_conformance::backends::{DeviceProcesses, Streams, device_worker};
use direct_dcp_conformance::{Backend, Case, Failure, attempt};

/// The device of all ranks.
const DEVICE: u32 = 0;
/// This very program, even if its file was replaced since it was started.
const SELF: &str = "/proc/self/exe";
/// Says that this process is a rank.
const RANK: &str = "rank";

/// What has to be set before the driver is loaded. Kernels wait for those of other streams, so each
/// stream needs a queue; all processes under MPS together have some 100. And no multicast, which
/// other programs of a host may be using.
fn variables(kind: &str) -> [(&'static str, &'static str); 2] {
    let queues = match kind {
        "streams" => "32",
        _ => "8",
    };
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", queues),
        ("DIRECT_DCP_DISABLE_MULTICAST", "1"),
    ]
}

/// A case that has taken so long hangs, and is the last one: what it left behind, in threads and on
/// the device, would be in the way of others.
const HUNG: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (kind, wanted) = match arguments.split_first() {
        Some((kind, rest)) => (kind.as_str(), rest),
        None => ("streams", [].as_slice()),
    };
    let unset = |(name, _): &(&str, &str)| env::var_os(name).is_none();
    let missing: Vec<_> = variables(kind).into_iter().filter(unset).collect();
    if !missing.is_empty() {
        let mut again = Command::new(SELF);
        let error = again.args(&arguments).envs(missing).exec();
        eprintln!("cannot start anew: {error}");
        return ExitCode::FAILURE;
    }
    let processes = DeviceProcesses::of(SELF, &[RANK]);
    let backend: &dyn Backend = match kind {
        RANK => return device_worker(DEVICE),
        "streams" => &Streams { device: DEVICE },
        "processes" => &processes,
        other => {
            eprintln!("{other:?} is neither streams nor processes");
            return ExitCode::FAILURE;
        }
    };
    let mut parts: Vec<Part> = Vec::new();
    for scenario in backend.scenarios() {
        let run = move || attempt(backend, &scenario);
        parts.push((scenario.name, Box::new(run)));
    }
    if kind == "processes" {
        parts.push(("kills", Box::new(|| kills(&processes))));
    }
    for wanted in wanted {
        if !parts.iter().any(|(name, _)| name == wanted) {
            eprintln!("there is no scenario {wanted:?}");
            return ExitCode::FAILURE;
        }
    }
    parts.retain(|(name, _)| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name));
    let device = match device() {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return ExitCode::SUCCESS;
        }
    };
    // A primary context takes a second to make and to end: streams share one from the first case to
    // the last. Under MPS one more client would take its share of the device.
    let held = match kind {
        "streams" => Context::new(&device).map(Some),
        _ => Ok(None),
    };
    match held {
        Ok(_held) => run(kind, &parts),
        Err(why) => {
            eprintln!("no context: {why}");
            ExitCode::FAILURE
        }
    }
}

/// A scenario's name, and what runs it.
type Part<'a> = (&'a str, Box<dyn Fn() -> Result<String, Failure> + 'a>);

/// Runs all parts, and says how each ended.
fn run(kind: &str, parts: &[Part<'_>]) -> ExitCode {
    let started = Instant::now();
    let mut failed = 0;
    for (name, part) in parts {
        let began = Instant::now();
        match part() {
            Ok(line) => println!("{line}"),
            Err(Failure(why)) => {
                failed += 1;
                println!("FAILED: {name}: {why}");
                if began.elapsed() > HUNG {
                    break;
                }
            }
        }
    }
    let (count, took) = (parts.len(), started.elapsed());
    println!("{kind}: {count} scenarios, {failed} failed, {took:.1?}");
    if failed > 0 {
        // A rank that hangs is a thread that is left behind, perhaps in the driver, whose own end
        // would wait for it.
        process::abort();
    }
    ExitCode::SUCCESS
}

/// The device that there is to run on, which it names.
fn device() -> Result<Device, CudaError> {
    let driver = Driver::load()?;
    let device = Device::new(&driver, DEVICE)?;
    println!("{}, driver {}", device.name()?, driver.version());
    Ok(device)
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
