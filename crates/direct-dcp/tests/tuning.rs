//! Tuning tables: their text, and workspaces on CPUs that go by them.

use direct_dcp::cuda::Delivery;
use direct_dcp::tuning::{Backend, Entry, Setting, Tuning, TuningError};
use direct_dcp::{
    DType, Group, KvGather, RowFormat, Way, Workspace, WorkspaceError, WorkspaceOptions,
};
use proptest::prelude::*;
use std::thread;

const ROWS: RowFormat = RowFormat::new(DType::Bytes, 100);

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let backends = [
        Backend::Threads,
        Backend::Processes,
        Backend::Cuda,
        Backend::CudaProcesses,
    ];
    let entry = (
        prop::sample::select(backends.to_vec()),
        2..9_usize,
        prop::sample::select(vec!["NVIDIA H200", "Größe 1", "#x"]),
        prop::sample::select(vec![Delivery::CopyOut, Delivery::ZeroCopy]),
        prop::option::of(0..5_usize),
        any::<prop::sample::Index>(),
        prop::option::of(1..=1024_usize),
    );
    let entry = entry.prop_map(|(backend, ranks, name, delivery, up_to, way, blocks)| {
        let ways: Vec<Way> = backend.ways().collect();
        let gpus = matches!(backend, Backend::Cuda | Backend::CudaProcesses);
        Entry {
            setting: Setting {
                backend,
                ranks,
                devices: if gpus { ranks } else { 0 },
                device: if gpus { name } else { "cpu" }.into(),
            },
            delivery,
            up_to,
            way: *way.get(&ways),
            blocks,
        }
    });
    prop::collection::vec(entry, 0..12)
}

proptest! {
    /// What is printed parses to the same, whatever the order was; a size given twice is refused.
    #[test]
    fn text_and_table_are_the_same(entries in entries()) {
        let same = |one: &Entry, other: &Entry| {
            (&one.setting, one.delivery, one.up_to) == (&other.setting, other.delivery, other.up_to)
        };
        let twice = entries
            .iter()
            .enumerate()
            .any(|(index, one)| entries[..index].iter().any(|other| same(one, other)));
        let table = Tuning::new(entries.clone());
        prop_assert_eq!(table.is_err(), twice);
        if let Ok(table) = table {
            prop_assert_eq!(&table.to_string().parse::<Tuning>().unwrap(), &table);
            let back = Tuning::new(entries.iter().rev().cloned()).unwrap();
            prop_assert_eq!(&back, &table);
            for entry in &entries {
                for bytes in 0..7 {
                    // The smallest that is not below, found in another way.
                    let fits = |other: &&Entry| {
                        other.setting == entry.setting
                            && other.delivery == entry.delivery
                            && other.up_to.unwrap_or(usize::MAX) >= bytes
                    };
                    let expected = entries
                        .iter()
                        .filter(fits)
                        .min_by_key(|other| other.up_to.unwrap_or(usize::MAX));
                    let found = table.entry(&entry.setting, entry.delivery, bytes);
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    let head = "\n# a table\n  direct-dcp-tuning 1  \n\n";
    let right = "cuda 4 1 copy-out any pull auto NVIDIA  H200\n";
    let table: Tuning = format!("{head}{right}").parse().unwrap();
    assert_eq!(table.entries()[0].setting.device, "NVIDIA H200");
    for (line, what, got) in [
        ("gpu 4 1 copy-out any pull auto x", "backend", "gpu"),
        ("cuda", "ranks", "nothing"),
        ("cuda four 1 copy-out any pull auto x", "ranks", "four"),
        ("cuda 1 1 copy-out any pull auto x", "ranks", "1"),
        ("cuda 4 5 copy-out any pull auto x", "devices", "5"),
        ("cuda 4 0 copy-out any pull auto x", "devices", "0"),
        ("threads 4 1 copy-out any pull auto cpu", "devices", "1"),
        ("cuda 4 1 copyout any pull auto x", "mode", "copyout"),
        ("cuda 4 1 copy-out -1 pull auto x", "up-to-bytes", "-1"),
        (
            "cuda 4 1 copy-out 99999999999999999999 pull auto x",
            "up-to-bytes",
            "99999999999999999999",
        ),
        ("cuda 4 1 copy-out any fetch auto x", "way", "fetch"),
        ("cuda 4 1 copy-out any staged auto x", "way", "staged"),
        (
            "cuda 4 1 copy-out any shared-slot auto x",
            "way",
            "shared-slot",
        ),
        (
            "threads 4 0 copy-out any multicast auto cpu",
            "way",
            "multicast",
        ),
        ("cuda 4 1 copy-out any pull 0 x", "blocks", "0"),
        ("cuda 4 1 copy-out any pull 1025 x", "blocks", "1025"),
        ("cuda 4 1 copy-out any pull many x", "blocks", "many"),
        ("cuda 4 1 copy-out any pull auto", "device", ""),
        ("cuda 4 1 copy-out any push 7 NVIDIA H200", "size", "any"),
    ] {
        let error = format!("{head}{right}# next\n{line}\n")
            .parse::<Tuning>()
            .unwrap_err();
        let TuningError::Line {
            line: at,
            what: column,
            got: found,
            ..
        } = &error
        else {
            panic!("{error:?}")
        };
        assert_eq!((*at, *column, found.as_str()), (7, what, got), "{line}");
        assert!(error.to_string().contains("line 7"), "{error}");
    }
    for (text, line) in [
        ("", 1),
        ("# only\n", 1),
        ("\ndirect-dcp-tuning 2\n", 2),
        (right, 1),
    ] {
        let error = text.parse::<Tuning>().unwrap_err();
        let TuningError::Line { line: at, what, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((*at, *what), (line, "head of the table"), "{text}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("table");
    let error = Tuning::load(&path).unwrap_err();
    assert!(matches!(error, TuningError::File { .. }), "{error:?}");
    assert!(
        error.to_string().contains(&path.display().to_string()),
        "{error}"
    );
    std::fs::write(&path, b"direct-dcp-tuning 1\n\xff\n").unwrap();
    assert!(matches!(Tuning::load(&path), Err(TuningError::File { .. })));
    std::fs::write(&path, "direct-dcp-tuning 1\n").unwrap();
    assert_eq!(Tuning::load(&path).unwrap(), Tuning::default());
    let refused = |path: &std::path::Path, word: &str| {
        let text = Tuning::load(path).unwrap_err().to_string();
        let named = text.contains(&path.display().to_string());
        assert!(named && text.contains(word), "{text}");
    };
    std::fs::write(&path, "direct-dcp-tuning 1\nthreads 1\n").unwrap();
    refused(&path, "line 2: devices");
    std::fs::write(&path, "#".repeat((256 << 10) + 1)).unwrap();
    refused(&path, "262145 bytes");
    refused(dir.path(), "not a regular file");
}

fn ranks<T: Send>(world: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let groups = Group::threads(world).unwrap();
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || body(group)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The memory is laid out by the entry for zero-copy calls of the capacity, or else the other.
#[test]
fn threads_go_by_a_table() {
    let table = |lines: &[&str]| -> Tuning {
        let lines: Vec<String> = lines.iter().map(|line| format!("{line} cpu\n")).collect();
        format!("direct-dcp-tuning 1\n{}", lines.concat())
            .parse()
            .unwrap()
    };
    let mixed = [
        "threads 3 0 copy-out any pull 1",
        "threads 3 0 zero-copy 1000 push 2",
        "threads 2 0 zero-copy any pull auto",
    ];
    for (lines, rows, expected) in [
        // Slices of 100 bytes a row.
        (&mixed[..], 10, Way::Push),
        (&mixed[..], 11, Way::Pull),
        (&mixed[2..], 10, Way::SharedSlot),
        (
            &["processes 3 0 zero-copy any pull auto"],
            10,
            Way::SharedSlot,
        ),
    ] {
        let options = WorkspaceOptions::new(3 * rows, ROWS).tuning(table(lines));
        // Room for any of the ways that it may come to.
        let forced = options.clone().way(expected).memory_bytes(3).unwrap();
        assert!(options.memory_bytes(3).unwrap() >= forced);
        ranks(3, |group| {
            let rank = group.rank();
            let workspace = Workspace::new(&group, options.clone()).unwrap();
            assert_eq!(workspace.way(), expected);
            let setting = workspace.setting();
            assert_eq!((setting.backend, setting.ranks), (Backend::Threads, 3));
            assert_eq!((setting.devices, setting.device.as_str()), (0, "cpu"));
            let gather = KvGather::new(workspace);
            let row = |rank: usize, call: usize| {
                let bytes = (0..rows * 100).map(move |i| (1 + rank * 31 + call * 7 + i % 97) as u8);
                bytes.collect::<Vec<u8>>()
            };
            for call in 0..4 {
                let expected: Vec<u8> = (0..3).flat_map(|rank| row(rank, call)).collect();
                let mut out = vec![0xee; expected.len()];
                gather.gather_into(0, &row(rank, call), &mut out).unwrap();
                assert_eq!(out, expected);
                let lent = gather.gather(0, &row(rank, call)).unwrap();
                assert_eq!(*lent, *expected);
            }
        });
        // A forced way goes before it.
        ranks(3, |group| {
            let options = options.clone().way(Way::SharedSlot);
            assert_eq!(
                Workspace::new(&group, options).unwrap().way(),
                Way::SharedSlot
            );
        });
    }
    // Tables that differ, and one that is missing.
    let other = table(&["threads 3 0 zero-copy 1000 push 3"]);
    for other in [Some(other), None] {
        let errors = ranks(2, |group| {
            let options = WorkspaceOptions::new(4, ROWS);
            let table = match group.rank() {
                0 => Some(table(&mixed)),
                _ => other.clone(),
            };
            let options = table.into_iter().fold(options, WorkspaceOptions::tuning);
            Workspace::new(&group, options).map(drop).unwrap_err()
        });
        for error in errors {
            assert!(
                matches!(
                    error,
                    WorkspaceError::Mismatch {
                        field: "tuning",
                        ..
                    }
                ),
                "{error:?}"
            );
        }
    }
}
