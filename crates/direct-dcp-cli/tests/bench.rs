//! `bench` prints figures that agree with each other, in every format.

mod common;

use common::run;
use serde_json::Value;

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} and {b}");
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let quick = [
        "bench", "--format", "json", "-n", "4", "-w", "2", "--loops", "3",
    ];
    let text = run(&[&quick[..], args].concat()).success();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn columns_agree() {
    for backend in ["threads", "processes"] {
        let args = [
            "--backend",
            backend,
            "--ranks",
            "3",
            "--rows",
            "1,17",
            "--row-bytes",
            "1153",
            "--way",
            "shared-slot,push,pull",
            "--blocks",
            "2",
        ];
        let document = json(&args);
        assert_eq!(
            (&document["ranks"], &document["row_bytes"]),
            (&3.into(), &1153.into())
        );
        assert_eq!(document["backend"], backend);
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 3 * 2 * 2);
        for row in results {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["wrong"], 0, "{row}");
            close(number("size"), 3.0 * number("rows") * 1153.0);
            assert!(
                number("time_us") > 0.0 && number("ceiling_us") > 0.0,
                "{row}"
            );
            assert!(number("p99_us") > 0.0, "{row}");
            close(
                number("algbw_gbs"),
                number("size") / number("time_us") / 1e3,
            );
            close(number("busbw_gbs"), number("algbw_gbs") * 2.0 / 3.0);
            close(number("ratio"), number("time_us") / number("ceiling_us"));
        }
        let ways: Vec<&str> = results
            .iter()
            .map(|row| row["way"].as_str().unwrap())
            .collect();
        assert!(
            ways.iter().step_by(4).eq(&["shared-slot", "push", "pull"]),
            "{ways:?}"
        );
    }
}

#[test]
fn sizes_grow_by_the_factor() {
    let rows = |args: &[&str]| -> Vec<u64> {
        let document = json(&[&["--mode", "zero-copy", "--row-bytes", "64"], args].concat());
        let rows = document["results"].as_array().unwrap();
        rows.iter()
            .map(|row| row["rows"].as_u64().unwrap())
            .collect()
    };
    // Two ranks: one row each is 128 bytes.
    assert_eq!(rows(&["-b", "128", "-e", "4K", "-f", "4"]), [1, 4, 16]);
    assert_eq!(rows(&["-e", "1K"]), [8]);
    assert_eq!(rows(&["-b", "1"]), [1]);
    assert_eq!(rows(&["--rows", "5,3"]), [5, 3]);
}

#[test]
fn unchecked_runs_say_so() {
    let document = json(&["--rows", "2", "-c", "0"]);
    assert_eq!(document["results"][0]["wrong"], Value::Null);
    let args = [
        "bench", "--rows", "2", "-c", "0", "--loops", "1", "-n", "1", "-w", "0",
    ];
    assert!(run(&args).success().trim_end().ends_with("N/A"));
}

#[test]
fn tables_and_csv() {
    let quick = ["bench", "--rows", "1,3", "-n", "2", "--loops", "2"];
    let text = run(&quick).success();
    assert!(
        text.contains("2 ranks as threads") && text.contains("size = S = ranks"),
        "{text}"
    );
    let rows: Vec<&str> = text.lines().filter(|line| line.ends_with(" 0")).collect();
    assert_eq!(rows.len(), 4, "{text}");

    let text = run(&[&quick[..], &["--format", "csv"]].concat()).success();
    let mut lines = text.lines().map(|line| line.split(',').count());
    let columns = lines.next().unwrap();
    assert_eq!(lines.collect::<Vec<_>>(), [columns; 4]);
}

#[test]
fn more_ranks_than_processors() {
    let document = json(&["--ranks", "16", "--rows", "3", "--mode", "copy-out"]);
    assert_eq!(document["results"][0]["wrong"], 0);
}

#[test]
fn final_layout_beside_what_it_replaces() {
    for backend in ["threads", "processes"] {
        let args = "--layout request-major --ranks 3 --rows 1,5,40 --row-bytes 1153 --planes \
                    1000,100,50,3 --requests 4 --way shared-slot,push";
        let mut args: Vec<&str> = args.split_whitespace().collect();
        args.extend(["--backend", backend]);
        let document = json(&args);
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 2 * 3 * 2);
        for row in results {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["wrong"], 0, "{row}");
            close(number("size"), 3.0 * number("rows") * 1153.0);
            assert!(
                number("time_us") > 0.0 && number("staged_us") > 0.0,
                "{row}"
            );
            close(number("ratio"), number("time_us") / number("staged_us"));
            // Every request ends in a round with one of three tokens.
            let requests = match number("rows") {
                1.0 => 1.0,
                // Shares of 1, 2, 3 and 4 tenths of 5, rounded down where they end: 0, 1, 3 and 5.
                5.0 => 3.0,
                _ => 4.0,
            };
            let valid = number("size") - requests * 2.0 * 1153.0;
            close(number("bytes_final"), valid);
            let arrivals = if row["mode"] == "copy-out" { 2.0 } else { 1.0 };
            close(number("bytes_staged"), arrivals * number("size") + valid);
        }
    }
    let args = "bench --layout request-major --rows 3 -n 2 --loops 2 --requests 1000";
    let text = run(&args.split(' ').collect::<Vec<_>>()).success();
    assert!(
        text.contains("staged") && text.contains("up to 1000 requests"),
        "{text}"
    );
}

#[test]
fn windows_in_flight_are_timed_and_right() {
    for backend in ["threads", "processes"] {
        let args = ["--pipeline", "--backend", backend, "--rows", "1,17"];
        let document = json(&[&args[..], &["--way", "shared-slot,push,pull"]].concat());
        let results = document["results"].as_array().unwrap();
        assert_eq!(results.len(), 2 * 3);
        for row in results {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["wrong"], 0, "{row}");
            assert!(
                number("gather_us") > 0.0 && number("copies") >= 1.0,
                "{row}"
            );
            close(
                number("ratio"),
                number("three_slots_us") / number("two_slots_us"),
            );
        }
    }
    let quick = [
        "bench",
        "--pipeline",
        "-n",
        "4",
        "--loops",
        "2",
        "--rows",
        "3",
    ];
    let table = run(&quick).success();
    let last = table.lines().last().unwrap();
    assert_eq!(last.split_whitespace().count(), 9, "{table}");
    let csv = run(&[&quick[..], &["--format", "csv"]].concat()).success();
    let fields: Vec<_> = csv.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(fields, [13, 13], "{csv}");
}
