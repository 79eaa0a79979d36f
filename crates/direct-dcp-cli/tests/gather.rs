//! `gather` delivers every byte, whatever the ranks, the interleave, the backend and the way.

mod common;

use common::{assert_same_tensor, example, larger_data, noise, run, write_tensor};
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::path::Path;
use tempfile::tempdir;

/// Gathers `input` and checks the file that comes out. Returns the JSON that is printed.
#[track_caller]
fn gathered(input: &Path, name: &str, options: &[&str]) -> Value {
    let dir = tempdir().unwrap();
    let output = dir.path().join("out.safetensors");
    let (input_text, output_text) = (input.to_str().unwrap(), output.to_str().unwrap());
    let mut args = vec![
        "gather",
        input_text,
        "--tensor",
        name,
        "--output",
        output_text,
    ];
    args.extend(["--format", "json"]);
    args.extend(options);
    let json: Value = serde_json::from_str(&run(&args).success()).unwrap();
    assert_same_tensor(input, &output, name);
    assert_eq!(common::listing(dir.path()), ["out.safetensors"]);
    assert_eq!(json["verified"], true);
    json
}

#[test]
fn example_data_in_every_way() {
    for backend in ["threads", "processes"] {
        for way in ["auto", "shared-slot", "push", "pull"] {
            for (ranks, interleave) in [
                ("2", "16"),
                ("3", "1"),
                ("4", "1"),
                ("4", "16"),
                ("8", "16"),
            ] {
                let options = [
                    "--backend",
                    backend,
                    "--way",
                    way,
                    "--ranks",
                    ranks,
                    "--interleave",
                    interleave,
                    "--iterations",
                    "3",
                ];
                let json = gathered(&example(), "kv", &options);
                let rows = json["per_rank"].as_array().unwrap();
                assert_eq!(rows.len().to_string(), ranks);
                if way != "auto" {
                    assert!(rows.iter().all(|row| row["way"] == way), "{json}");
                }
            }
        }
    }
}

#[test]
fn ranks_without_a_single_token() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("in.safetensors");
    for backend in ["threads", "processes"] {
        for rows in 1..=5 {
            write_tensor(&input, "kv", Dtype::BF16, &[rows, 33], &noise(rows * 66));
            let json = gathered(&input, "kv", &["--ranks", "8", "--backend", backend]);
            let valid: Vec<u64> = json["per_rank"]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| row["valid_rows"].as_u64().unwrap())
                .collect();
            let expected: Vec<u64> = (0..8).map(|rank| u64::from(rank < rows)).collect();
            assert_eq!(valid, expected);
        }
    }
}

#[test]
fn every_element_type_and_uneven_shards() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("in.safetensors");
    let types = [
        (Dtype::F16, 2),
        (Dtype::BF16, 2),
        (Dtype::F8_E4M3, 1),
        (Dtype::U8, 1),
        (Dtype::I8, 1),
    ];
    for (dtype, size) in types {
        for (dim, interleave) in [(1, "1"), (577, "7"), (656, "64"), (3, "1000")] {
            write_tensor(&input, "rows", dtype, &[257, dim], &noise(257 * dim * size));
            gathered(
                &input,
                "rows",
                &["--ranks", "4", "--interleave", interleave],
            );
        }
    }
}

#[test]
fn rows_longer_than_what_is_read_at_a_time() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("in.safetensors");
    write_tensor(&input, "kv", Dtype::U8, &[3, 5 << 20], &noise(15 << 20));
    gathered(&input, "kv", &["--ranks", "2", "--iterations", "1"]);
    // And runs longer than that.
    write_tensor(&input, "kv", Dtype::F16, &[3000, 3000], &noise(18_000_000));
    let options = ["--ranks", "2", "--interleave", "2000", "--iterations", "1"];
    gathered(&input, "kv", &options);
}

#[test]
fn the_table_names_every_rank() {
    let text = run(&["gather", example().to_str().unwrap(), "--ranks", "3"]).success();
    assert!(
        text.contains("F16 [256, 768], 3 threads, interleave 1"),
        "{text}"
    );
    assert!(text.contains("86/86") && text.contains("85/86"), "{text}");
    assert!(
        text.contains("3 of 3 ranks got every row as it is in the file"),
        "{text}"
    );
}

#[test]
fn an_existing_output_is_replaced() {
    let dir = tempdir().unwrap();
    let output = dir.path().join("out");
    std::fs::write(&output, "old").unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&output, &link).unwrap();
    let (input, link_text) = (example(), link.to_str().unwrap());
    run(&["gather", input.to_str().unwrap(), "--output", link_text]).success();
    assert_same_tensor(&input, &output, "kv");
    assert!(link.is_symlink());
}

#[test]
fn the_larger_data_if_it_is_there() {
    let Some(input) = larger_data("minilm_kv.safetensors") else {
        return;
    };
    for backend in ["threads", "processes"] {
        gathered(&input, "kv", &["--ranks", "4", "--backend", backend]);
    }
}
