//! GPUs, without one: what the program says where there is none, and what it does with a driver and
//! kernels that run on the CPU.

mod common;

use common::{Ended, assert_same_tensor, command, example, finish, on_gpus, run};
use direct_dcp_fake_cuda::library_path;
use direct_dcp_fake_gpu::variables as fake_gpu;
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
    assert_refused(ended, 1, word);
}

#[track_caller]
fn assert_refused(ended: &Ended, status: i32, word: &str) {
    assert_eq!(ended.status.code(), Some(status), "{ended:?}");
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
fn gathers_in_every_way() {
    let file = example();
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let base = [
        "gather",
        file.to_str().unwrap(),
        "--format",
        "json",
        "--iterations",
        "3",
    ];
    let base = [&base[..], &["--output", output.to_str().unwrap()]].concat();
    for backend in ["cuda", "cuda-processes"] {
        for (devices, ranks, way, taken) in [
            ("1", "2", "auto", "pull/push"),
            ("1", "3", "push", "push"),
            ("1", "3", "pull", "pull"),
            ("1", "3", "copy-engine", "copy-engine"),
            ("1", "3", "staged", "staged"),
            ("2", "2", "auto", "multicast"),
            ("2", "2", "multicast", "multicast"),
            ("2", "5", "auto", "pull/push"),
        ] {
            println!("{backend} {devices} {ranks} {way}");
            let more = [
                "--backend",
                backend,
                "--ranks",
                ranks,
                "--way",
                way,
                "--interleave",
                "7",
            ];
            let text = on_gpus(devices, &[&base[..], &more].concat(), &[]);
            let document: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(document["backend"], backend);
            assert_eq!(document["verified"], true);
            let rows = document["per_rank"].as_array().unwrap();
            assert_eq!(rows.len().to_string(), ranks);
            assert!(rows.iter().all(|row| row["way"] == taken), "{document}");
            assert_same_tensor(&file, &output, "kv");
        }
    }
}

#[test]
fn a_way_that_the_devices_do_not_have_is_refused() {
    let file = example();
    let args = [
        "gather",
        file.to_str().unwrap(),
        "--backend",
        "cuda",
        "--way",
        "multicast",
    ];
    let mut command = command();
    command.args(args).env("DIRECT_DCP_FAKE_DEVICES", "1");
    let ended = finish(command.envs(fake_gpu()).spawn().unwrap());
    assert_error(&ended, "multicast cannot be had");
    assert_error(&ended, "shares its device");
}

#[test]
fn benchmarks_agree_with_themselves() {
    let quick = [
        "bench", "--format", "json", "-n", "4", "-w", "2", "--loops", "3",
    ];
    for (devices, backend, graph) in [
        ("1", "cuda", Some(3)),
        ("1", "cuda-processes", None),
        ("2", "cuda", None),
        ("2", "cuda-processes", Some(2)),
    ] {
        let ways = match (devices, graph) {
            ("2", _) => "multicast,push",
            (_, Some(_)) => "push,pull,staged",
            (_, None) => "push,copy-engine",
        };
        let mut args = quick.to_vec();
        args.extend([
            "--rows",
            "1,17",
            "--row-bytes",
            "1152",
            "--backend",
            backend,
            "--way",
            ways,
        ]);
        let launches = graph.map(|launches: u64| launches.to_string());
        if let Some(launches) = &launches {
            args.extend(["-G", launches]);
        }
        let document: Value = serde_json::from_str(&on_gpus(devices, &args, &[])).unwrap();
        assert_eq!(document["cudagraph"].as_u64(), graph);
        assert_eq!(document["copies_between_devices"], devices == "2");
        let rate = document["copy_gbs"].as_f64().unwrap();
        let results = document["results"].as_array().unwrap();
        // In a graph the staged algorithm only copies out.
        let copies_only = usize::from(ways.contains("staged"));
        assert_eq!(
            results.len(),
            2 * (2 * ways.split(',').count() - copies_only)
        );
        for row in results {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["wrong"], 0, "{row}");
            assert!(number("time_us") > 0.0 && number("p99_us") > 0.0, "{row}");
            let slice = number("rows") * 1152.0;
            // Bytes that are copied: of one device, half of those read and written.
            let copied = if devices == "2" { slice } else { slice * 3.0 };
            let floor = copied / rate / 1e3;
            assert!((number("floor_us") - floor).abs() < 1e-6 * floor, "{row}");
            let ratio = number("time_us") / number("floor_us");
            assert!((number("ratio") - ratio).abs() < 1e-6 * ratio, "{row}");
            assert_eq!(number("size"), 2.0 * slice);
        }
    }
}

#[test]
fn a_benchmark_of_nothing_is_refused() {
    let args = [
        "bench",
        "--backend",
        "cuda",
        "--way",
        "staged",
        "--mode",
        "zero-copy",
        "-G",
        "2",
    ];
    assert_refused(&with_fake(&args, &[]), 2, "only copies out");
}

#[test]
fn benchmarks_print_tables_and_csv() {
    let quick = [
        "bench",
        "--backend",
        "cuda",
        "--rows",
        "1",
        "-n",
        "2",
        "--loops",
        "2",
        "-w",
        "1",
    ];
    let text = on_gpus("1", &[&quick[..], &["-G", "2"]].concat(), &[]);
    for word in [
        "2 ranks as threads on GPUs, device 0 (Fake GPU 0)",
        "2 launches of a graph of 2 calls",
        "(W + W x W) slices",
        "floor",
    ] {
        assert!(text.contains(word), "{text}");
    }
    assert_eq!(
        text.lines().filter(|line| line.ends_with(" 0")).count(),
        2,
        "{text}"
    );
    let text = on_gpus("1", &[&quick[..], &["--format", "csv"]].concat(), &[]);
    let columns: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, [15; 3], "{text}");
    assert!(
        text.lines()
            .nth(1)
            .unwrap()
            .starts_with("2,cuda,,1152,2304,1,pull,"),
        "{text}"
    );
}

#[test]
fn the_doctor_tries_groups_and_no_multicast() {
    // Creating an object would fail, and gathers would say so.
    let plan = [("DIRECT_DCP_FAKE_FAIL", "cuMulticastCreate:1:999")];
    let text = on_gpus("2", &["doctor", "--format", "json"], &plan);
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["works"], true);
    assert_check(
        &document,
        "cuda",
        "ok",
        "gathered by push, pull, copy-engine",
    );
    assert_check(
        &document,
        "cuda-processes",
        "ok",
        "gathered by push, pull, copy-engine",
    );
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
    assert_check(&document, "vmm", "limited", "have the ranks on CPUs");
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
    assert_check(
        &document,
        "way",
        "ok",
        "takes push, and pull to copy out, not multicast",
    );

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
