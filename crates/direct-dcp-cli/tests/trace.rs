//! `bench --trace` counts the gathers of a trace as somebody would who goes token by token.

mod common;

use common::{larger_data, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::tempdir;

fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversation_20.jsonl")
}

/// The whole trace, where somebody has it.
fn whole() -> Option<PathBuf> {
    const FILE: &str = "mooncake_conversation_4000.jsonl";
    let path = larger_data(FILE)?;
    if !path.is_file() {
        println!("skipped: DIRECT_DCP_DATA has no {FILE}");
        return None;
    }
    Some(path)
}

/// The tokens of each request that are cached when it comes.
fn contexts(trace: &Path) -> Vec<usize> {
    let text = fs::read_to_string(trace).unwrap();
    // By block, the first request that has it.
    let mut first: BTreeMap<u64, usize> = BTreeMap::new();
    let requests: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let ids = |request: &Value| -> Vec<u64> {
        let ids = request["hash_ids"].as_array().unwrap();
        ids.iter().map(|id| id.as_u64().unwrap()).collect()
    };
    for (number, request) in requests.iter().enumerate() {
        for id in ids(request) {
            first.entry(id).or_insert(number);
        }
    }
    requests
        .iter()
        .enumerate()
        .map(|(number, request)| {
            let ids = ids(request);
            let new = ids.iter().position(|id| first[id] == number);
            let input = request["input_length"].as_u64().unwrap() as usize;
            (new.unwrap_or(ids.len()) * 512).min(input - 1)
        })
        .collect()
}

/// Gathers, valid rows and padded rows, token by token. `window` is the most rows of a gather.
fn counted(contexts: &[usize], ranks: usize, interleave: usize, window: usize) -> [u64; 3] {
    let mut counts = [0; 3];
    for &context in contexts {
        let (mut room, mut round) = (0, None);
        for token in 0..context {
            if room == 0 {
                counts[0] += 1;
                room = window;
            }
            room -= 1;
            counts[1] += 1;
            // A round that is begun travels whole.
            let of = token / interleave / ranks;
            if round != Some(of) {
                round = Some(of);
                counts[2] += (interleave * ranks) as u64;
            }
        }
    }
    counts
}

#[track_caller]
fn check(trace: &Path, contexts: &[usize], plan: [usize; 4], window: usize) -> [u64; 3] {
    let [ranks, interleave, block, budget] = plan.map(|number| number.to_string());
    let args = [
        "bench",
        "--trace",
        trace.to_str().unwrap(),
        "--ranks",
        &ranks,
        "--interleave",
        &interleave,
        "--block",
        &block,
        "--budget",
        &budget,
        "--row-bytes",
        "656",
        "--format",
        "json",
    ];
    let document: Value = serde_json::from_str(&run(&args).success()).unwrap();
    assert_eq!(document["budget_rows"], window);
    let totals = &document["totals"];
    let number = |name: &str| totals[name].as_u64().unwrap();
    assert_eq!(number("requests"), contexts.len() as u64);
    assert_eq!(
        number("context_tokens"),
        contexts.iter().sum::<usize>() as u64
    );
    let expected = counted(contexts, plan[0], plan[1], window);
    let [gathers, valid, padded] = expected;
    let found = ["gathers", "rows_valid", "rows_padded"].map(number);
    assert_eq!(found, expected, "{document}");
    assert_eq!(number("bytes_gathered"), valid * 656);
    assert_eq!(number("bytes_staged"), (padded + padded + valid) * 656);
    assert!(gathers > 0);
    expected
}

#[test]
fn twenty_requests() {
    let contexts = contexts(&small());
    assert_eq!(
        contexts,
        [
            0, 512, 512, 512, 512, 1_901, 512, 1_024, 512, 1_536, 512, 2_560, 2_560, 4_096, 3_072,
            3_584, 512, 99_328, 1_536, 3_072
        ]
    );
    let count = |plan, window| check(&small(), &contexts, plan, window);
    // 19 contexts, one of which takes two gathers; the one of 1,901 is three rows short of a round.
    assert_eq!(count([8, 1, 64, 65_536], 65_536), [20, 128_365, 128_368]);
    count([9, 16, 64, 65_536], 65_664);
    count([2, 1, 1, 1], 2);
    count([16, 64, 48, 1_000], 3_072);
    count([5, 7, 16, 4_096], 4_480);
}

#[test]
fn all_four_thousand() {
    let Some(trace) = whole() else { return };
    let contexts = contexts(&trace);
    assert_eq!(contexts.len(), 4_000);
    for (plan, window) in [
        ([8, 1, 64, 65_536], 65_536),
        ([9, 16, 64, 65_536], 65_664),
        ([4, 64, 64, 8_192], 8_192),
    ] {
        println!("{plan:?}: {:?}", check(&trace, &contexts, plan, window));
    }
}

#[test]
fn tables() {
    let text = run(&["bench", "--trace", small().to_str().unwrap()]).success();
    for words in [
        "2 ranks, interleave 1, pages of 64 tokens, at most 65536 rows",
        "rows valid",
        "bytes staged",
    ] {
        assert!(text.contains(words), "{text}");
    }
    let numbers = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line[name.len()..].trim().to_string()
    };
    assert_eq!(numbers("requests"), "20");
    assert_eq!(numbers("rows valid"), "128365");
    assert_eq!(numbers("bytes gathered"), "147876480     141.0 MiB");
}

/// What is timed delivers what was planned, or the program would fail.
#[test]
fn timed() {
    for (backend, more) in [
        ("threads", "--budget 4096 --interleave 3 --limit 17"),
        ("processes", "--ranks 3 --limit 17"),
    ] {
        let mut args = vec!["bench", "--trace"];
        let trace = small();
        args.push(trace.to_str().unwrap());
        args.extend([
            "--time",
            "--row-bytes",
            "40",
            "--format",
            "json",
            "--backend",
            backend,
        ]);
        args.extend(more.split(' '));
        let document: Value = serde_json::from_str(&run(&args).success()).unwrap();
        assert_eq!(document["totals"]["requests"], 17);
        let number = |name: &str| document["timed"][name].as_f64().unwrap();
        let bytes = document["totals"]["bytes_gathered"].as_f64().unwrap();
        assert!((number("gathered_gbs") * number("seconds") * 1e9 / bytes - 1.0).abs() < 1e-9);
        assert!(number("staged_seconds") > number("seconds"), "{document}");
    }
    let text = run(&["bench", "--trace", small().to_str().unwrap(), "--time"]).success();
    assert!(
        text.contains("gathers/s") && text.contains("staged seconds"),
        "{text}"
    );
}

#[test]
fn what_is_wrong_is_said_in_a_line() {
    let dir = tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let good = fs::read_to_string(small()).unwrap();
    let cut = write("cut", &good[..good.len() - 5]);
    let empty = write("empty", "");
    let (small, folder) = (small(), dir.path().to_str().unwrap().to_string());
    let small = small.to_str().unwrap();
    let trace = |file: &str, more: &[&str]| {
        let mut args = vec!["bench", "--trace", file];
        args.extend(more);
        run(&args)
    };
    for (ended, status, words) in [
        (trace(&cut, &[]), 1, "line 20: no request in JSON: EOF"),
        (trace(&empty, &[]), 1, "no requests"),
        (trace(&folder, &[]), 1, "regular file"),
        (trace("/no/such/file", &[]), 1, "no such file"),
        (trace("/dev/zero", &[]), 1, "regular file"),
        (trace(small, &["--format", "csv"]), 2, "csv"),
        (trace(small, &["--rows", "1"]), 2, "--rows"),
        (trace(small, &["--way", "push"]), 2, "--way"),
        (trace(small, &["--budget", "0"]), 2, "positive"),
        (trace(small, &["--limit", "0"]), 2, "positive"),
        (trace(small, &["--time", "--limit", "1"]), 1, "no request"),
        (trace(small, &["--backend", "processes"]), 2, "--time"),
        (
            trace(small, &["--time", "--backend", "cuda"]),
            2,
            "--backend cuda",
        ),
        (run(&["bench", "--time"]), 2, "--trace"),
        (trace(small, &["--budget", "3000000000"]), 2, "budget"),
        (
            trace(small, &["--interleave", "18446744073709551615"]),
            2,
            "interleave",
        ),
        (
            trace(small, &["--row-bytes", "18446744073709551615"]),
            1,
            "bytes",
        ),
        (run(&["bench", "--budget", "64"]), 2, "--trace"),
        (run(&["bench", "--time", "--rows", "1"]), 2, "--rows"),
        (run(&["bench", "--time", "-n", "5"]), 2, "--iters"),
        (run(&["bench", "--limit", "2", "-w", "1"]), 2, "--warmup"),
        (
            run(&["bench", "--interleave", "2", "--tune", "x"]),
            2,
            "--tune",
        ),
        (
            run(&["bench", "--block", "2", "--pipeline"]),
            2,
            "--pipeline",
        ),
        (run(&["bench", "--time", "--planes", "1"]), 2, "--planes"),
    ] {
        assert_eq!(ended.status.code(), Some(status), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
        assert!(
            ended.stderr.starts_with("error: ") && ended.stderr.contains(words),
            "{words}: {ended:?}"
        );
        assert!(ended.stdout.is_empty(), "{ended:?}");
    }
}
