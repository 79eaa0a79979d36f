//! `bench --tune` writes a table that the program and the library go by.

mod common;

use common::{Ended, command, example, finish, listing, run};
use direct_dcp::Tuning;
use direct_dcp::cuda::Delivery;
use direct_dcp::tuning::Backend;
use direct_dcp_fake_gpu::variables as fake_gpu;
use serde_json::Value;
use std::fs;
use std::path::Path;

const QUICK: [&str; 7] = ["bench", "-n", "3", "-w", "1", "--loops", "3"];

fn on_gpus(devices: &str, args: &[&str]) -> Ended {
    let mut command = command();
    command.args(args).env("DIRECT_DCP_FAKE_DEVICES", devices);
    command.envs(fake_gpu());
    finish(command.spawn().unwrap())
}

/// Checks that the table is what was measured, for `ranks` ranks and rows of 1,152 bytes.
#[track_caller]
fn consistent(document: &Value, table: &Tuning, ranks: usize, ways: &[&str]) {
    assert_eq!(document["table"], table.to_string());
    let results = document["results"].as_array().unwrap();
    assert!(!results.is_empty());
    for result in results {
        let times = result["times"].as_array().unwrap();
        let names: Vec<&str> = times.iter().map(|time| time[0].as_str().unwrap()).collect();
        assert_eq!(names, ways);
        let least = times.iter().min_by(|one, other| {
            let [one, other] = [one, other].map(|time| time[1].as_f64().unwrap());
            one.total_cmp(&other)
        });
        let delivery = match result["mode"].as_str().unwrap() {
            "copy-out" => Delivery::CopyOut,
            _ => Delivery::ZeroCopy,
        };
        let bytes = 1152 * result["rows"].as_u64().unwrap() as usize;
        let mut settings = table.entries().iter().map(|entry| &entry.setting);
        let setting = settings.find(|setting| setting.ranks == ranks).unwrap();
        let entry = table.entry(setting, delivery, bytes).unwrap();
        assert_eq!(entry.way.to_string(), least.unwrap()[0].as_str().unwrap());
        // Beyond the largest size as well.
        assert!(table.entry(setting, delivery, usize::MAX).is_some());
    }
}

#[test]
fn every_way_of_every_backend_is_measured() {
    let cpu = &["shared-slot", "push", "pull"][..];
    for (backend, devices, name, ways) in [
        ("threads", "1", Backend::Threads, cpu),
        ("processes", "1", Backend::Processes, cpu),
        // Ranks that share a device leave the engines alone.
        ("cuda", "1", Backend::Cuda, &["push", "pull"]),
        (
            "cuda",
            "2",
            Backend::Cuda,
            &["multicast", "push", "pull", "copy-engine"],
        ),
        (
            "cuda-processes",
            "1",
            Backend::CudaProcesses,
            &["push", "pull"],
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let file = path.to_str().unwrap();
        let base = [&QUICK[..], &["--backend", backend, "--tune", file]].concat();
        let tune = [&base[..], &["--rows", "17,1", "--format", "json"]].concat();
        let document: Value = serde_json::from_str(&on_gpus(devices, &tune).success()).unwrap();
        let table = Tuning::load(&path).unwrap();
        consistent(&document, &table, 2, ways);
        assert!(
            table
                .entries()
                .iter()
                .all(|entry| entry.setting.backend == name)
        );
        let results = document["results"].as_array().unwrap();
        let sizes: Vec<_> = results
            .iter()
            .map(|r| r["rows"].as_u64().unwrap())
            .collect();
        assert_eq!(sizes, [1, 1, 17, 17], "in ascending order, in both modes");
        // Another number of ranks is added; one mode of the same is replaced.
        let more = [
            &base[..],
            &["--ranks", "3", "--rows", "5", "--format", "csv"],
        ]
        .concat();
        on_gpus("1", &more).success();
        let both = Tuning::load(&path).unwrap();
        let of = |ranks| {
            let entries = both.entries().iter();
            entries.filter(move |entry| entry.setting.ranks == ranks)
        };
        assert!(of(2).eq(table.entries()), "{both}");
        assert_eq!(of(3).count(), 2);
        let again = [
            &base[..],
            &["--rows", "2", "--mode", "copy-out", "--blocks", "1"],
        ]
        .concat();
        let said = on_gpus(devices, &again).success();
        let after = Tuning::load(&path).unwrap();
        assert!(said.ends_with(&after.to_string()), "{said}");
        let entries = after.entries().iter();
        let of_two = entries.filter(|entry| entry.setting.ranks == 2);
        let (replaced, kept): (Vec<_>, Vec<_>) =
            of_two.partition(|entry| entry.delivery == Delivery::CopyOut);
        assert!(
            replaced.len() == 1 && replaced[0].blocks == Some(1),
            "{after}"
        );
        assert!(
            kept.iter().all(|entry| table.entries().contains(entry)),
            "{after}"
        );
        assert_eq!(listing(dir.path()), ["table"], "nothing else is left");
    }
}

fn write(path: &Path, lines: &[&str]) {
    let text = format!("direct-dcp-tuning 1\n{}\n", lines.join("\n"));
    fs::write(path, text).unwrap();
}

#[test]
fn bench_and_gather_go_by_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("table");
    let file = path.to_str().unwrap();
    let data = example();
    let device = {
        // The devices' name, as a table has it.
        let tune = [
            &QUICK[..],
            &["--backend", "cuda", "--rows", "1", "--tune", file],
        ]
        .concat();
        on_gpus("1", &tune).success();
        let table = Tuning::load(&path).unwrap();
        table.entries()[0].setting.device.clone()
    };
    let lines = [
        "threads 2 0 zero-copy 1152 push auto cpu".to_string(),
        "threads 2 0 zero-copy any pull auto cpu".to_string(),
        format!("cuda 2 1 copy-out 1152 push auto {device}"),
        format!("cuda 2 1 copy-out any copy-engine auto {device}"),
        format!("cuda 2 1 zero-copy any pull 2 {device}"),
    ];
    write(&path, &lines.each_ref().map(String::as_str));
    let ways = |backend, more: &[&str]| -> Vec<String> {
        let args = ["--backend", backend, "--rows", "1,17", "--format", "json"];
        let args = [&QUICK[..], &args, &["--tuning", file], more].concat();
        let ended = on_gpus("1", &args);
        let note = ended.stderr.contains("no entry for 2 processes");
        assert_eq!(note, backend == "processes", "{ended:?}");
        let document: Value = serde_json::from_str(&ended.stdout).unwrap();
        let results = document["results"].as_array().unwrap();
        assert!(results.iter().all(|row| row["wrong"] == 0), "{document}");
        results
            .iter()
            .map(|row| row["way"].as_str().unwrap().into())
            .collect()
    };
    assert_eq!(ways("threads", &[]), ["push", "push", "pull", "pull"]);
    assert_eq!(ways("processes", &[]), ["shared-slot"; 4]);
    assert_eq!(
        ways("threads", &["--way", "shared-slot"]),
        ["shared-slot"; 4]
    );
    assert_eq!(ways("cuda", &[]), ["push", "pull", "copy-engine", "pull"]);
    // A graph cannot have the engines.
    assert_eq!(ways("cuda", &["-G", "2"]), ["push", "pull", "push", "pull"]);

    let gathered = |backend| {
        let base = [
            "gather",
            data.to_str().unwrap(),
            "--ranks",
            "2",
            "--format",
            "json",
        ];
        let args = [&base[..], &["--backend", backend, "--tuning", file]].concat();
        let document: Value = serde_json::from_str(&on_gpus("1", &args).success()).unwrap();
        assert_eq!(document["verified"], true);
        document["per_rank"][0]["way"].as_str().unwrap().to_string()
    };
    assert_eq!(gathered("threads"), "pull");
    assert_eq!(gathered("cuda"), "copy-engine/pull");
}

#[test]
fn a_table_for_others_is_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("table");
    fs::write(
        &path,
        "direct-dcp-tuning 1\nprocesses 2 0 zero-copy any pull auto cpu\nthreads 3 0 zero-copy any pull auto cpu\n",
    )
    .unwrap();
    let file = path.to_str().unwrap();
    let (own, other) = (["--ranks", "3"], ["--ranks", "2"]);
    for (ranks, note) in [(own, ""), (other, "has no entry for 2 threads")] {
        let base = &[
            "bench", "--rows", "1", "--loops", "1", "-n", "1", "--tuning", file,
        ][..];
        let ended = run(&[base, &ranks].concat());
        assert!(ended.status.success(), "{ended:?}");
        assert_eq!(ended.stderr.is_empty(), note.is_empty(), "{ended:?}");
        assert!(ended.stderr.contains(note), "{ended:?}");
        assert_eq!(ended.stdout.contains("pull"), note.is_empty(), "{ended:?}");
    }
}

#[test]
fn what_cannot_be_tuned_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("table");
    let file = path.to_str().unwrap();
    let refused = |args: &[&str], status: i32, word: &str| {
        let ended = run(&[&QUICK[..], args].concat());
        assert_eq!(ended.status.code(), Some(status), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
        assert!(ended.stderr.contains(word), "{ended:?}");
        assert!(ended.stdout.is_empty(), "{ended:?}");
    };
    refused(&["--tune", file, "--way", "staged"], 2, "staged");
    refused(
        &["--tune", file, "--way", "multicast"],
        2,
        "shared-slot, push, pull",
    );
    refused(&["--tune", file, "--way", "push,auto"], 2, "name none");
    refused(&["--tuning", file], 1, "No such file");
    assert!(listing(dir.path()).is_empty());
    // A file that is no table is not replaced by one.
    fs::write(
        &path,
        "direct-dcp-tuning 1\nthreads 2 0 copy-out any fetch auto cpu\n",
    )
    .unwrap();
    refused(
        &["--tune", file],
        1,
        "line 2: way: expected shared-slot, push, pull, got fetch",
    );
    refused(&["--tuning", file], 1, "line 2");
    assert!(fs::read_to_string(&path).unwrap().contains("fetch"));
    let nowhere = dir.path().join("no").join("table");
    refused(
        &["--tune", nowhere.to_str().unwrap(), "--rows", "1"],
        1,
        "no such file",
    );
    let both = run(&[&QUICK[..], &["--tune", file, "--tuning", file]].concat());
    assert_eq!(both.status.code(), Some(2), "{both:?}");
}
