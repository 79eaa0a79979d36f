//! Alone in its process, because it counts what the process has open.

mod group_common;

use group_common::{WAYS, each, watched};
use std::time::Duration;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("memfd:direct-dcp"))
        .count()
}

#[test]
fn nothing_stays_open() {
    watched(|| {
        let before = open_descriptors();
        for (name, way) in WAYS {
            for round in 0..15 {
                each(way(4), |group| {
                    group.all_gather(b"here").unwrap();
                    if group.rank() == round % 4 {
                        return;
                    }
                    let group = group.rebuild(Duration::from_secs(20)).unwrap();
                    group.barrier().unwrap();
                });
            }
            assert_eq!(open_descriptors(), before, "by {name}");
            assert_eq!(mappings(), 0, "by {name}");
        }
    });
}
