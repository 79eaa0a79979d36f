//! GPUs, without one: what the program says where there is none, and what it finds out about a
//! driver that runs on the CPU.

mod common;

use common::{Ended, command, example, finish, run};
use direct_dcp_fake_cuda::library_path;
use serde_json::Value;

/// Runs with the fake driver, and these variables.
fn with_fake(args: &[&str], variables: &[(&str, &str)]) -> Ended {
    let mut command = command();
    command.args(args).env("DIRECT_DCP_LIBCUDA", library_path());
    for (name, value) in variables {
        command.env(name, value);
    }
    finish(command.spawn().unwrap())
}

#[track_caller]
fn assert_error(ended: &Ended, word: &str) {
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(
        ended.stderr.starts_with("error: ") && ended.stderr.contains(word),
        "{ended:?}"
    );
    assert!(ended.stdout.is_empty(), "{ended:?}");
}

#[test]
fn without_a_driver_nothing_starts() {
    let file = example();
    let file = file.to_str().unwrap();
    for backend in ["cuda", "cuda-processes"] {
        let ended = run(&["gather", file, "--backend", backend]);
        assert_error(&ended, "no NVIDIA driver");
        assert_error(&ended, "/no/such/libcuda.so");
        let ended = run(&["bench", "--backend", backend, "-G", "2", "--format", "csv"]);
        assert_error(&ended, "no NVIDIA driver");
    }
    // Not even an output.
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let args = [
        "gather",
        file,
        "--backend",
        "cuda",
        "--output",
        output.to_str().unwrap(),
    ];
    assert_error(&run(&args), "no NVIDIA driver");
    assert!(common::listing(dir.path()).is_empty());
}

#[test]
fn devices_that_are_not_there() {
    let none = [("DIRECT_DCP_FAKE_DEVICES", "0")];
    let ended = with_fake(&["bench", "--backend", "cuda"], &none);
    assert_error(&ended, "CUDA_ERROR_NO_DEVICE");
    let ended = with_fake(&["bench", "--backend", "cuda", "--device", "2"], &[]);
    assert_error(&ended, "less than 2");
    let large = [
        "bench",
        "--backend",
        "cuda",
        "--device",
        "0",
        "--rows",
        "700000",
        "--row-bytes",
        "1024",
    ];
    assert_error(&with_fake(&large, &[]), "more memory than device 0 has");
}

#[test]
fn the_doctor_needs_one_line_without_a_driver() {
    let text = run(&["doctor"]).success();
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("NVIDIA"))
        .collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(
        lines[0].starts_with("cuda  ") && lines[0].contains(" none "),
        "{text}"
    );
    assert!(
        text.lines().last().is_some_and(|last| last == lines[0]),
        "{text}"
    );
    let document: Value =
        serde_json::from_str(&run(&["doctor", "--format", "json"]).success()).unwrap();
    assert_eq!(document["works"], true);
    assert!(document["cuda"]["driver"].is_null(), "{document}");
    assert!(
        document["cuda"]["error"]
            .as_str()
            .unwrap()
            .contains("no NVIDIA driver"),
        "{document}"
    );
}

/// What the doctor says of a fake machine: the document, and its check of this name.
fn examined(variables: &[(&str, &str)]) -> Value {
    let ended = with_fake(&["doctor", "--format", "json"], variables);
    serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"))
}

#[track_caller]
fn check<'a>(document: &'a Value, what: &str) -> &'a Value {
    let checks = document["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["what"] == what);
    found.unwrap_or_else(|| panic!("no {what} in {document:#}"))
}

#[track_caller]
fn assert_check(document: &Value, what: &str, verdict: &str, word: &str) {
    let check = check(document, what);
    let text = format!("{} {}", check["found"], check["change"]);
    assert!(
        check["verdict"] == verdict && text.contains(word),
        "{check}"
    );
}

#[test]
fn the_doctor_examines_two_devices() {
    let document = examined(&[]);
    assert_check(&document, "cuda driver", "ok", "CUDA 13.0");
    assert_check(&document, "symbols", "ok", "every function");
    assert_check(&document, "device 1", "ok", "Fake GPU 1");
    assert_check(
        &document,
        "device 1",
        "ok",
        "sm_90, 8.0 GiB, 132 multiprocessors",
    );
    assert_check(&document, "vmm", "ok", "every device");
    assert_check(&document, "posix fd", "ok", "same memory");
    assert_check(&document, "fabric", "ok", "can be created");
    assert_check(&document, "multicast", "ok", "offered by every device");
    assert_check(
        &document,
        "peers of 0",
        "ok",
        "1: native atomics, rank 0, bytes verified",
    );
    assert_check(
        &document,
        "queues",
        "limited",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
    );
    assert_check(&document, "way", "ok", "multicast if its self-test passes");
    let cuda = &document["cuda"];
    assert_eq!(cuda["devices"].as_array().unwrap().len(), 2);
    assert_eq!(cuda["peers"].as_array().unwrap().len(), 2);
    assert_eq!(cuda["peers"][0]["tried"], "works");
    assert_eq!(cuda["devices"][0]["uuid"].as_str().unwrap().len(), 32);
    assert_eq!(cuda["way"], "multicast");
}

#[test]
fn the_doctor_says_what_is_missing_and_what_to_change() {
    let without = |what| examined(&[("DIRECT_DCP_FAKE_WITHOUT", what)]);

    let document = without("vmm");
    assert_check(&document, "vmm", "limited", "not on device 0, 1");
    assert_check(&document, "vmm", "limited", "use the CPU backend");
    assert_check(&document, "cuda", "failed", "could not build the workspace");
    assert_eq!(document["works"], false);

    let document = without("fd");
    assert_check(&document, "posix fd", "limited", "not offered by device 0");
    assert_check(&document, "cuda-processes", "failed", "posix fd");

    let document = without("imex");
    assert_check(&document, "fabric", "limited", "no IMEX channel");
    assert_check(&document, "fabric", "limited", "nvidia-caps-imex-channels");

    let document = without("fabric,multicast");
    assert_check(&document, "fabric", "none", "do not need it");
    assert_check(&document, "multicast", "none", "not on device 0, 1");
    assert_check(&document, "way", "ok", "takes push, and not multicast");

    let document = without("p2p");
    assert_check(&document, "peers of 0", "limited", "1: no access");
}

#[test]
fn the_doctor_knows_the_environment() {
    let variables = [
        ("DIRECT_DCP_FAKE_DEVICES", "1"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ];
    let document = examined(&variables);
    assert_check(&document, "multicast", "limited", "unset NCCL_NVLS_ENABLE");
    assert_check(&document, "queues", "ok", "=32");
    assert_check(&document, "mps", "limited", "nvidia-cuda-mps-control -d");
    assert_check(
        &document,
        "way",
        "ok",
        "ranks that share this device take push",
    );
    assert_eq!(
        document["cuda"]["multicast_forbidden_by"],
        "NCCL_NVLS_ENABLE"
    );

    let document = examined(&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")]);
    assert_check(
        &document,
        "queues",
        "limited",
        "CUDA_DEVICE_MAX_CONNECTIONS=1;",
    );

    // A driver without a device is a machine without a GPU.
    let document = examined(&[("DIRECT_DCP_FAKE_DEVICES", "0")]);
    assert_check(&document, "cuda", "none", "docker run --gpus all");
    assert_eq!(document["works"], true);
    // One that does not start is a fault.
    let document = examined(&[("DIRECT_DCP_FAKE_FAIL", "cuInit:1:802")]);
    assert_check(&document, "cuda", "failed", "nvidia-fabricmanager");
    assert_eq!(document["works"], false);
}

#[test]
fn a_device_that_fails_in_the_middle_is_reported() {
    // Whatever call fails, there is a report, and no panic.
    for symbol in [
        "cuMemCreate",
        "cuMemMap",
        "cuDeviceGetName",
        "cuMemImportFromShareableHandle",
    ] {
        let plan = format!("{symbol}:1:999");
        let document = examined(&[("DIRECT_DCP_FAKE_FAIL", &plan)]);
        let text = document.to_string();
        assert!(text.contains(symbol), "{text}");
    }
}
