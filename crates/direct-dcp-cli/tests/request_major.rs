//! `gather --layout request-major` delivers every byte to its place, whatever the requests, the
//! chunks, the planes and the pages.

mod common;

use common::{assert_same_tensor, example, larger_data, noise, run, write_tensor};
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::path::Path;
use tempfile::tempdir;

/// Gathers `input`, and checks the file that comes out, and what is counted. Returns the JSON.
#[track_caller]
fn gathered(
    input: &Path,
    requests: &[usize],
    [ranks, interleave]: [usize; 2],
    more: &str,
) -> Value {
    let dir = tempdir().unwrap();
    let output = dir.path().join("out.safetensors");
    let list: Vec<String> = requests.iter().map(usize::to_string).collect();
    let (input_text, output_text) = (input.to_str().unwrap(), output.to_str().unwrap());
    let line = format!(
        "gather --layout request-major --format json --iterations 2 --ranks {ranks} --interleave \
         {interleave} --requests {} {more}",
        list.join(",")
    );
    let mut args: Vec<&str> = line.split_whitespace().collect();
    args.extend([input_text, "--output", output_text]);
    let json: Value = serde_json::from_str(&run(&args).success()).unwrap();
    assert_same_tensor(input, &output, "kv");
    assert_eq!(json["verified"], true);
    assert_eq!(json["layout"], "request-major");

    // Token by token.
    let mut valid = vec![0_u64; ranks];
    let mut padded = 0;
    for &len in requests {
        for token in 0..len {
            valid[token / interleave % ranks] += 1;
        }
        padded += len.div_ceil(ranks * interleave) * interleave;
    }
    let rows = json["per_rank"].as_array().unwrap();
    assert_eq!(rows.len(), ranks);
    for (row, valid) in rows.iter().zip(&valid) {
        assert_eq!(row["valid_rows"], *valid, "{json}");
        assert_eq!(row["padded_rows"], padded, "{json}");
        assert!(row["request_major"]["median_us"].as_f64().unwrap() > 0.0);
    }
    let tokens: usize = requests.iter().sum();
    assert_eq!(json["padding_rows"], padded * ranks - tokens, "{json}");
    json
}

#[test]
fn the_example_in_chunks_planes_and_pages() {
    for backend in ["threads", "processes"] {
        for way in ["shared-slot", "push"] {
            for (group, more, chunks, largest) in [
                ([2, 1], "", 1, 258),
                ([4, 16], "--planes 384,384 --chunk-rows 100", 3, 128),
                ([3, 1], "--paged 16 --planes 1,2,3,762", 1, 258),
                ([4, 1], "--paged 5 --chunk-rows 1", 14, 20),
            ] {
                let more = format!("--backend {backend} --way {way} {more}");
                let json = gathered(&example(), &[201, 0, 55], group, &more);
                assert!(
                    json["per_rank"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .all(|row| row["way"] == way)
                );
                assert_eq!(
                    (&json["chunks"], &json["chunk_rows"]),
                    (&chunks.into(), &largest.into())
                );
            }
        }
    }
}

#[test]
fn ranks_without_a_single_token() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("in.safetensors");
    for backend in ["threads", "processes"] {
        write_tensor(&input, "kv", Dtype::BF16, &[6, 33], &noise(6 * 66));
        let more = format!("--backend {backend} --paged 2 --planes 32,1");
        gathered(&input, &[1, 0, 3, 2], [8, 1], &more);
    }
}

#[test]
fn every_element_type() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("in.safetensors");
    for (dtype, size) in [
        (Dtype::F16, 2),
        (Dtype::BF16, 2),
        (Dtype::F8_E4M3, 1),
        (Dtype::U8, 1),
        (Dtype::I8, 1),
    ] {
        write_tensor(&input, "kv", dtype, &[257, 656], &noise(257 * 656 * size));
        gathered(&input, &[100, 157], [5, 7], "--planes 528,128 --paged 64");
    }
}

#[test]
fn the_table_says_what_was_planned() {
    let file = example();
    let mut args = vec![
        "gather",
        file.to_str().unwrap(),
        "--layout",
        "request-major",
    ];
    args.extend([
        "--requests",
        "200,56",
        "--chunk-rows",
        "128",
        "--planes",
        "384,384",
    ]);
    args.extend(["--ranks", "3", "--paged", "8"]);
    let text = run(&args).success();
    for words in [
        "2 requests, 2 chunks of up to 144 rows, planes of 384 + 384, pages of 8 rows",
        "86/86",
        "request-major",
        "3 of 3 ranks got every row as it is in the file, in its final place",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn the_larger_data_if_it_is_there() {
    let Some(input) = larger_data("minilm_kv.safetensors") else {
        return;
    };
    for backend in ["threads", "processes"] {
        let more = format!("--backend {backend} --chunk-rows 1024 --planes 384,384 --paged 16");
        gathered(&input, &[3000, 200, 896], [4, 1], &more);
    }
}
