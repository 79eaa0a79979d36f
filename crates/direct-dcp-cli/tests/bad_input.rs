//! Whatever is wrong with the input, the program says so in one line that has the word to search
//! for, and leaves nothing behind.

mod common;

use common::{Ended, command, example, finish, listing, noise, run, write_tensor};
use safetensors::tensor::Dtype;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use tempfile::tempdir;

#[track_caller]
fn assert_refused(ended: &Ended, status: i32, word: &str) {
    assert_eq!(ended.status.code(), Some(status), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(
        ended.stderr.starts_with("error: ") && ended.stderr.contains(word),
        "{ended:?}"
    );
    assert!(
        !ended.stderr.contains("panicked") && ended.stdout.is_empty(),
        "{ended:?}"
    );
}

/// A safetensors file with this header, and as many bytes of data.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(noise(data));
    file
}

/// Files, and the word by which people look for what is wrong with them.
fn files() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let one = |dtype: &str, shape: &str, end: u64, data| {
        let header =
            format!(r#"{{"kv":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
        with_header(&header, data)
    };
    let mut truncated = fs::read(example()).unwrap();
    truncated.truncate(200_000);
    let mut longer = fs::read(example()).unwrap();
    longer.push(0);
    vec![
        ("empty", vec![], "0 bytes"),
        ("seven bytes", vec![1; 7], "7 bytes"),
        (
            "text",
            b"# a README, and no tensors".to_vec(),
            "not a safetensors file",
        ),
        ("noise", noise(10_000), "not a safetensors file"),
        ("header longer than anything", vec![255; 64], "header"),
        (
            "header longer than the file",
            with_header("{}", 0)[..9].to_vec(),
            "truncated",
        ),
        (
            "header that is no JSON",
            with_header("{\"kv\":", 0),
            "header is invalid",
        ),
        (
            "header that is no text",
            with_header("{\"k\u{fffd}", 0)[..12].to_vec(),
            "truncated",
        ),
        (
            "header of lists",
            with_header(&"[".repeat(100_000), 0),
            "header is invalid",
        ),
        ("truncated", truncated, "truncated"),
        ("longer", longer, "1 bytes follow"),
        ("no tensors", with_header("{}", 0), "the file has none"),
        (
            "offsets past the end",
            one("U8", "[2,8]", 16, 15),
            "truncated",
        ),
        (
            "offsets far past the end",
            one("U8", "[1,2305843009213693951]", (1 << 61) - 1, 16),
            "truncated",
        ),
        (
            "shape that wraps",
            one("F16", "[9223372036854775808,4]", 0, 0),
            "invalid",
        ),
        (
            "shape unlike the offsets",
            one("F16", "[4,4]", 16, 16),
            "invalid",
        ),
        ("negative shape", one("F16", "[-4,4]", 16, 16), "invalid"),
        ("no such dtype", one("F17", "[1,8]", 16, 16), "invalid"),
        ("no rows", one("F16", "[0,8]", 0, 0), "zero rows"),
        ("no columns", one("F16", "[8,0]", 0, 0), "zero columns"),
        ("one dimension", one("F16", "[8]", 16, 16), "2-dimensional"),
        (
            "three dimensions",
            one("F16", "[1,1,8]", 16, 16),
            "2-dimensional",
        ),
        (
            "F32",
            one("F32", "[2,2]", 16, 16),
            "F16, BF16, F8_E4M3, U8 and I8",
        ),
        (
            "F8_E5M2",
            one("F8_E5M2", "[4,4]", 16, 16),
            "unsupported dtype F8_E5M2",
        ),
        (
            "BOOL",
            one("BOOL", "[4,4]", 16, 16),
            "unsupported dtype BOOL",
        ),
        (
            "name that breaks lines",
            with_header(
                r#"{"a\n\u001b[2J":{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]}}"#,
                1,
            ),
            r"\u{1b}[2J",
        ),
    ]
}

#[test]
fn files_that_are_not_what_they_should_be() {
    let dir = tempdir().unwrap();
    let input = dir.path().join("input.safetensors");
    let outputs = tempdir().unwrap();
    let output = outputs.path().join("out");
    let (input_text, output_text) = (input.to_str().unwrap(), output.to_str().unwrap());
    for (what, bytes, word) in files() {
        println!("{what}");
        fs::write(&input, bytes).unwrap();
        let ended = run(&["gather", input_text, "--output", output_text]);
        assert_refused(&ended, 1, word);
        assert!(ended.stderr.contains("input.safetensors"), "{ended:?}");
        assert!(listing(outputs.path()).is_empty());
    }
}

#[test]
fn options_that_cannot_be() {
    let file = example();
    let file = file.to_str().unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["gather"], 2, "FILE"),
        (&["gather", "no/such.safetensors"], 1, "no such file"),
        (&["gather", "/"], 1, "directory"),
        (&["gather", "/dev/null"], 1, "regular file"),
        (
            &["gather", file, "--tensor", "kw"],
            1,
            "attention, kv, lse, query",
        ),
        (&["gather", file, "--tensor", "query"], 1, "2-dimensional"),
        (&["gather", file, "--ranks", "0"], 2, "2 to 1024 ranks"),
        (&["gather", file, "--ranks", "1"], 2, "2 to 1024 ranks"),
        (&["gather", file, "--ranks", "1025"], 2, "2 to 1024 ranks"),
        (&["gather", file, "--ranks", "-3"], 2, "-3"),
        (&["gather", file, "--ranks", "many"], 2, "2 to 1024 ranks"),
        (&["gather", file, "--interleave", "0"], 2, "positive"),
        (
            &["gather", file, "--interleave", "18446744073709551615"],
            2,
            "interleave",
        ),
        (&["gather", file, "--iterations", "0"], 2, "1 to 1000000"),
        (
            &["gather", file, "--way", "multicast"],
            2,
            "shared-slot, push, pull",
        ),
        (
            &["gather", file, "--way", "teleport"],
            2,
            "shared-slot, multicast, push, pull",
        ),
        (
            &["gather", file, "--way", "shared-slot", "--backend", "cuda"],
            2,
            "multicast, push, pull, copy-engine",
        ),
        (
            &["gather", file, "--backend", "mpi"],
            2,
            "threads, processes, cuda, cuda-processes",
        ),
        (&["gather", file, "--device", "0"], 2, "--backend cuda"),
        (&["gather", file, "--device", "-1"], 2, "-1"),
        (&["gather", file, "--nonsense"], 2, "--nonsense"),
        (&["gather", file, "--output", ""], 2, "--output"),
        (
            &["gather", file, "--output", "/no/such/dir/out"],
            1,
            "no such file",
        ),
        (
            &["gather", file, "--output", "/dev/null/out"],
            1,
            "/dev/null/out",
        ),
        (
            &["gather", file, "--output", "/dev/null"],
            1,
            "regular file",
        ),
        (&["gather", file, "--output", "/tmp"], 1, "directory"),
        (&["gather", file, "--output", ".."], 1, "directory"),
        (&["gather", file, "--output", file], 1, "input itself"),
        (&["bench", "-b", "1T"], 2, "4K, 1M or 2G"),
        (&["bench", "-b", "2K", "-e", "1K"], 2, "--maxbytes"),
        (&["bench", "-b", "1K", "--rows", "1"], 2, "--rows"),
        (&["bench", "-f", "1"], 2, "at least 2"),
        (&["bench", "-f", "4"], 2, "--minbytes"),
        (&["bench", "-e", "64K", "-f", "4"], 2, "--minbytes"),
        (&["bench", "-f", "4", "--rows", "1"], 2, "--rows"),
        (&["bench", "-n", "0"], 2, "1 to 1000000"),
        (&["bench", "-c", "2"], 2, "--check"),
        (&["bench", "--rows", "0"], 2, "positive"),
        (&["bench", "--rows", "1,x"], 2, "positive"),
        (&["bench", "--rows", "18446744073709551615"], 1, "memory"),
        (
            &["bench", "--rows", "1000000", "--row-bytes", "1G"],
            1,
            "memory",
        ),
        (&["bench", "--row-bytes", "0"], 2, "size"),
        (&["bench", "--mode", "in-place"], 2, "copy-out, zero-copy"),
        (&["bench", "--blocks", "0"], 2, "1 to 1024"),
        (&["bench", "--device", "0"], 2, "--backend cuda"),
        (
            &["bench", "--way", "push,staged"],
            2,
            "shared-slot, push, pull",
        ),
        (&["bench", "-G", "20"], 2, "--backend cuda"),
        (&["bench", "-G", "0"], 2, "1 to 1000000"),
        (
            &[
                "bench",
                "-G",
                "2",
                "--backend",
                "cuda",
                "--way",
                "copy-engine",
            ],
            2,
            "captured",
        ),
        (&["completions", "cmd.exe"], 2, "bash"),
        (&["frobnicate"], 2, "frobnicate"),
        (&["rank"], 1, "--backend processes"),
    ];
    for (args, status, word) in cases {
        println!("{args:?}");
        assert_refused(&run(args), *status, word);
    }
}

#[test]
fn the_input_under_another_name_is_still_the_input() {
    let dir = tempdir().unwrap();
    let (input, link) = (dir.path().join("in"), dir.path().join("link"));
    write_tensor(&input, "kv", Dtype::U8, &[2, 2], &[1, 2, 3, 4]);
    let before = fs::read(&input).unwrap();
    for make in [fs::hard_link::<&Path, &Path>, std::os::unix::fs::symlink] {
        make(&input, &link).unwrap();
        let args = [
            "gather",
            input.to_str().unwrap(),
            "--output",
            link.to_str().unwrap(),
        ];
        assert_refused(&run(&args), 1, "input itself");
        fs::remove_file(&link).unwrap();
    }
    assert_eq!(fs::read(&input).unwrap(), before);
}

#[test]
fn an_existing_output_survives_a_failure() {
    let dir = tempdir().unwrap();
    let output = dir.path().join("out");
    fs::write(&output, "precious").unwrap();
    let file = example();
    let args = [
        "gather",
        file.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
        "--interleave",
        "999999999999",
    ];
    assert_refused(&run(&args), 1, "memory");
    assert_eq!(fs::read_to_string(&output).unwrap(), "precious");
    assert_eq!(listing(dir.path()), ["out"]);
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let file = example();
    let commands: [&[&str]; 6] = [
        &["gather", file.to_str().unwrap()],
        &["bench", "--rows", "1,2,3", "--loops", "2"],
        &["doctor"],
        &["completions", "zsh"],
        &["--help"],
        &["--version"],
    ];
    for args in commands {
        let mut child = command().args(args).spawn().unwrap();
        drop(child.stdout.take());
        let ended = finish(child);
        assert!(
            ended.status.success() && ended.stderr.is_empty(),
            "{args:?} {ended:?}"
        );
        // A full disk is one.
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let child = command()
            .args(args)
            .stdout(Stdio::from(full))
            .spawn()
            .unwrap();
        assert_refused(&finish(child), 1, "standard output");
    }
}
