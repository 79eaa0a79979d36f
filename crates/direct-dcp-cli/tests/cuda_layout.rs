//! Final layout and windows in flight on GPUs, with a driver and kernels that run on the CPU.

mod common;

use common::{assert_same_tensor, example, noise, on_gpus, write_tensor};
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::path::Path;
use tempfile::tempdir;

/// Runs a line of options, and reads the JSON that it prints.
#[track_caller]
fn json(devices: &str, line: &str, more: &[&str]) -> Value {
    let mut args: Vec<&str> = line.split_whitespace().collect();
    args.extend(more);
    args.extend(["--format", "json"]);
    serde_json::from_str(&on_gpus(devices, &args, &[])).unwrap()
}

/// Gathers `input` on devices, and checks the file that comes out.
#[track_caller]
fn gathered(input: &Path, devices: &str, line: &str) -> Value {
    let dir = tempdir().unwrap();
    let output = dir.path().join("out.safetensors");
    let line = format!("gather --layout request-major --iterations 2 {line}");
    let more = [
        input.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ];
    let document = json(devices, &line, &more);
    assert_same_tensor(input, &output, "kv");
    assert_eq!(document["verified"], true);
    assert_eq!(document["layout"], "request-major");
    for row in document["per_rank"].as_array().unwrap() {
        assert!(row["request_major"]["median_us"].as_f64().unwrap() > 0.0);
    }
    document
}

#[test]
fn the_example_in_chunks_planes_and_pages() {
    for backend in ["cuda", "cuda-processes"] {
        for (devices, way, ranks, more, chunks) in [
            ("1", "push", "2", "", 1),
            ("1", "copy-engine", "3", "--planes 700,68", 1),
            (
                "1",
                "auto",
                "4",
                "--interleave 16 --planes 384,384 --chunk-rows 100",
                3,
            ),
            ("1", "push", "3", "--paged 16 --planes 1,2,3,762", 1),
            (
                "2",
                "multicast",
                "2",
                "--paged 5 --chunk-rows 1 --planes 8,760",
                27,
            ),
        ] {
            let line = format!(
                "--backend {backend} --way {way} --ranks {ranks} --requests 201,0,55 {more}"
            );
            let document = gathered(&example(), devices, &line);
            assert_eq!(document["chunks"], chunks, "{line}: {document}");
            let taken = if way == "auto" { "push" } else { way };
            let rows = document["per_rank"].as_array().unwrap();
            assert!(rows.iter().all(|row| row["way"] == taken), "{document}");
        }
    }
}

#[test]
fn ranks_without_a_single_token_and_rows_of_odd_size() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("in.safetensors");
    write_tensor(&input, "kv", Dtype::BF16, &[6, 33], &noise(6 * 66));
    let line = "--backend cuda --ranks 8 --requests 1,0,3,2 --paged 2 --planes 32,1";
    gathered(&input, "1", line);
    write_tensor(&input, "kv", Dtype::U8, &[257, 656], &noise(257 * 656));
    let line = "--backend cuda --ranks 5 --interleave 7 --requests 100,157 --planes 528,128";
    gathered(&input, "2", line);
}

#[test]
fn final_layout_beside_what_it_replaces() {
    for (devices, backend, ranks, graph, way) in [
        ("1", "cuda", 3, Some("3"), "push"),
        ("1", "cuda", 2, None, "push,copy-engine"),
        ("1", "cuda-processes", 2, Some("2"), "push"),
        ("2", "cuda", 2, Some("2"), "multicast,push"),
    ] {
        let line = format!(
            "bench --layout request-major --backend {backend} --way {way} --ranks {ranks} --rows \
             1,40 --row-bytes 1168 --planes 1024,96,32,16 --requests 4 -n 3 -w 1 --loops 3"
        );
        let graph: Vec<&str> = graph.into_iter().flat_map(|count| ["-G", count]).collect();
        let document = json(devices, &line, &graph);
        assert!(document["copy_gbs"].is_null(), "{document}");
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 2 * 2 * way.split(',').count());
        for row in results {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["wrong"], 0, "{line}: {row}");
            assert!(number("time_us") > 0.0 && number("p99_us") > 0.0, "{row}");
            let ratio = number("time_us") / number("staged_us");
            assert!((number("ratio") - ratio).abs() < 1e-6 * ratio, "{row}");
            // Every request ends in a round with one token.
            let requests = if number("rows") == 1.0 { 1 } else { 4 };
            let padding = (requests * (ranks - 1) * 1168) as f64;
            assert_eq!(number("bytes_final"), number("size") - padding);
            let arrivals = if row["mode"] == "copy-out" { 2.0 } else { 1.0 };
            let staged = arrivals * number("size") + number("bytes_final");
            assert_eq!(number("bytes_staged"), staged);
        }
    }
    let line = "bench --layout request-major --backend cuda --rows 3 -n 2 --loops 2 -G 1";
    let args: Vec<&str> = line.split(' ').collect();
    let text = on_gpus("1", &args, &[]);
    for words in [
        "device 0 (Fake GPU 0)",
        "ratio = time / staged",
        "request-major: up to 8",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn windows_in_flight_are_timed_and_right() {
    for (devices, backend, way) in [
        ("1", "cuda", "push,pull"),
        ("1", "cuda-processes", "push"),
        ("2", "cuda", "multicast"),
    ] {
        let line = format!(
            "bench --pipeline --backend {backend} --way {way} --rows 1,17 --row-bytes 48 -n 4 -w 1 \
             --loops 3"
        );
        let document = json(devices, &line, &[]);
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 2 * way.split(',').count());
        for row in results {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["wrong"], 0, "{row}");
            assert_eq!(number("size"), 2.0 * 48.0 * number("rows"));
            assert!(number("gather_us") > 0.0, "{row}");
            assert!(number("copies") > 0.0 && number("copies") <= 1.0, "{row}");
            let ratio = number("three_slots_us") / number("two_slots_us");
            assert!((number("ratio") - ratio).abs() < 1e-6 * ratio, "{row}");
        }
    }
    let line = "bench --pipeline --backend cuda --rows 5 -n 2 --loops 2 -w 0";
    let args: Vec<&str> = line.split(' ').collect();
    let text = on_gpus("1", &args, &[]);
    for words in ["device 0 (Fake GPU 0)", "each read by few blocks", "S=3"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
