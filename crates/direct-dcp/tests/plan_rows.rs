//! Row maps: the cases that callers know, and what is refused.

use direct_dcp::Pages;
use direct_dcp::plan::{PlanError, RowMap, Run};

const MOST: usize = i32::MAX as usize;

fn runs(map: &RowMap) -> Vec<(usize, usize, usize)> {
    map.runs()
        .iter()
        .map(|run| (run.src, run.dst, run.len))
        .collect()
}

fn all(padded: &[usize], lens: &[Vec<usize>], starts: &[usize]) -> Vec<RowMap> {
    (0..lens[0].len())
        .map(|rank| RowMap::for_requests(padded, lens, starts, rank).unwrap())
        .collect()
}

#[test]
fn two_requests_on_two_ranks() {
    let maps = all(&[4, 3], &[vec![4, 3], vec![7, 5]], &[0, 4]);
    assert_eq!(maps[0].dst_rows(), [0, 1, 2, 3, 7, 8, 9]);
    assert_eq!(runs(&maps[0]), [(0, 0, 4), (4, 7, 3)]);
    assert_eq!(maps[1].dst_rows(), [4, 5, 6, -1, 10, -1, -1]);
    assert_eq!(runs(&maps[1]), [(0, 4, 3), (4, 10, 1)]);
    for map in &maps {
        assert_eq!((map.local_rows(), map.total_rows()), (7, 11));
    }
    assert_eq!(maps[0].digest(), maps[1].digest());
    RowMap::check_group(&maps, &[7, 4]).unwrap();
}

#[test]
fn three_requests_on_four_ranks() {
    let lens = [vec![8, 8, 7, 6], vec![4, 2, 2, 2], vec![6, 6, 5, 4]];
    let maps = all(&[4, 4, 6], &lens, &[4, 0, 0]);
    let mut places = Vec::new();
    for map in &maps {
        assert_eq!((map.local_rows(), map.total_rows()), (14, 44));
        assert_eq!(map.digest(), maps[0].digest());
        places.extend(map.dst_rows().into_iter().filter(|&row| row >= 0));
    }
    assert_eq!(runs(&maps[3]), [(0, 11, 2), (4, 21, 2), (8, 40, 4)]);
    places.sort_unstable();
    assert!(places.into_iter().eq(0..44));
    RowMap::check_group(&maps, &[13, 10, 21]).unwrap();
}

#[test]
fn a_rank_without_rows_has_an_empty_run() {
    let map = RowMap::for_requests(&[2, 1], &[[2, 0], [0, 1]], &[0, 0], 1).unwrap();
    assert_eq!(runs(&map), [(0, 2, 0), (2, 2, 1)]);
    assert_eq!(map.dst_rows(), [-1, -1, 2]);
    // What a rank has before its start does not count, nor what it has behind the padded rows.
    let map = RowMap::for_requests(&[2], &[[3, 9]], &[5], 1).unwrap();
    assert_eq!(runs(&map), [(0, 0, 2)]);
    assert_eq!(map.total_rows(), 2);
}

#[test]
fn digests_cover_what_the_group_agrees_on() {
    let base = ([4, 3], [[4, 3], [7, 5]], [0, 4]);
    let digest = |(padded, lens, starts): ([usize; 2], [[usize; 2]; 2], [usize; 2])| {
        let map = |rank| RowMap::for_requests(&padded, &lens, &starts, rank).unwrap();
        assert_eq!(map(0).digest(), map(1).digest());
        map(0).digest()
    };
    let mut digests = vec![digest(base)];
    digests.push(digest(([4, 4], base.1, base.2)));
    digests.push(digest((base.0, [[4, 3], [7, 4]], base.2)));
    digests.push(digest((base.0, base.1, [1, 4])));
    digests.push(RowMap::uneven(&[4, 3], 0).unwrap().digest());
    digests.push(RowMap::uneven(&[3, 4], 0).unwrap().digest());
    digests.push(RowMap::from_rows(&[0], 7).unwrap().digest());
    digests.push(RowMap::from_rows(&[0], 8).unwrap().digest());
    digests.push(RowMap::from_rows(&[0], 8).unwrap().with_digest(12).digest());
    assert_eq!(digests.last(), Some(&12));
    let count = digests.len();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), count);
}

#[test]
fn uneven_counts() {
    let counts = [3, 0, 5, 1, 0];
    let maps: Vec<_> = (0..5)
        .map(|rank| RowMap::uneven(&counts, rank).unwrap())
        .collect();
    assert_eq!(runs(&maps[2]), [(0, 3, 5)]);
    assert_eq!(maps[2].dst_rows(), [3, 4, 5, 6, 7]);
    assert!(maps[1].dst_rows().is_empty() && maps[4].dst_rows().is_empty());
    for (map, count) in maps.iter().zip(counts) {
        assert_eq!((map.local_rows(), map.total_rows()), (count, 9));
        assert_eq!(map.digest(), maps[0].digest());
    }
    RowMap::check_group(&maps, &[9]).unwrap();
    // Nobody has anything.
    let maps = [
        RowMap::uneven(&[0, 0], 0).unwrap(),
        RowMap::uneven(&[0, 0], 1).unwrap(),
    ];
    RowMap::check_group(&maps, &[]).unwrap();
}

#[test]
fn rows_and_runs_say_the_same() {
    let rows = [-1, 5, 6, 7, -1, 0, 2, 1];
    let map = RowMap::from_rows(&rows, 9).unwrap();
    let expected = [(1, 5, 3), (5, 0, 1), (6, 2, 1), (7, 1, 1)];
    assert_eq!(runs(&map), expected);
    assert_eq!(map.dst_rows(), rows);
    let mut given: Vec<Run> = map.runs().to_vec();
    given.reverse();
    given.push(Run {
        src: 0,
        dst: 0,
        len: 0,
    });
    assert_eq!(RowMap::from_runs(given, 8, 9).unwrap(), map);
    let last = RowMap::from_rows(&[i32::MAX - 1], MOST).unwrap();
    assert_eq!(last.dst_rows(), [i32::MAX - 1]);
}

#[test]
fn rows_out_of_range_and_twice() {
    let refused = |rows: &[i32]| RowMap::from_rows(rows, 4).unwrap_err();
    let range = |row| PlanError::OutOfRange { row, total_rows: 4 };
    assert_eq!(refused(&[0, 4]), range(4));
    assert_eq!(refused(&[2, 3, 4, 5]), range(4));
    assert_eq!(refused(&[i32::MIN]), range(i32::MIN.into()));
    assert_eq!(refused(&[-2]), range(-2));
    assert_eq!(refused(&[1, -1, 1]), PlanError::Duplicate { row: 1 });
    assert_eq!(refused(&[1, 2, 3, 2]), PlanError::Duplicate { row: 2 });
    let run = |src, dst, len| Run { src, dst, len };
    for (runs, word) in [
        (vec![run(3, 0, 2)], "4 local rows"),
        (vec![run(usize::MAX, 0, 2)], "4 local rows"),
        (vec![run(0, usize::MAX, 2)], "out of range"),
        (vec![run(0, 0, 2), run(1, 2, 1)], "another run"),
        (vec![run(0, 0, 2), run(2, 1, 2)], "row 1"),
    ] {
        let error = RowMap::from_runs(runs, 4, 4).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn maps_that_do_not_cover() {
    // Two requests of 3 and 5 rows, with an empty one between them.
    let requests = [3, 0, 5];
    let check = |rows: [&[i32]; 2]| {
        let maps = rows.map(|rows| RowMap::from_rows(rows, 8).unwrap());
        RowMap::check_group(&maps, &requests)
    };
    check([&[0, 1, 3, 4], &[2, -1, 5, 6, 7]]).unwrap();
    let gap = |request, row| Err(PlanError::Gap { request, row });
    assert_eq!(check([&[0, 3, 4], &[2, 5, 6, 7]]), gap(0, 1));
    assert_eq!(check([&[0, 1, 4], &[2, 5, 6, 7]]), gap(2, 3));
    assert_eq!(check([&[0, 1, 3, 4], &[2, 5, 6]]), gap(2, 7));
    let overlap = |request, row, first, second| {
        Err(PlanError::Overlap {
            request,
            row,
            first,
            second,
        })
    };
    assert_eq!(
        check([&[0, 1, 2, 3, 4], &[2, 5, 6, 7]]),
        overlap(0, 2, 0, 1)
    );
    assert_eq!(
        check([&[0, 1, 3, 4, 5], &[2, 5, 6, 7]]),
        overlap(2, 5, 0, 1)
    );
    let text = check([&[0, 3, 4], &[2, 5, 6, 7]]).unwrap_err().to_string();
    assert!(text.contains("request 0") && text.contains("gap"), "{text}");

    // Lengths by which the requests have more rows, or fewer, than they should.
    let maps = all(&[4, 3], &[vec![4, 3], vec![7, 5]], &[0, 4]);
    assert_eq!(RowMap::check_group(&maps, &[7, 5]), gap(1, 11));
    let row = 10;
    let total_rows = 10;
    assert_eq!(
        RowMap::check_group(&maps, &[7, 3]),
        Err(PlanError::OutOfRange { row, total_rows })
    );
    assert!(RowMap::check_group(&maps, &[usize::MAX, 1]).is_err());
    assert_eq!(RowMap::check_group(&[], &[0, 2]), gap(1, 0));
}

#[test]
fn refusals() {
    let none: [[usize; 2]; 0] = [];
    let refused = |result: Result<RowMap, PlanError>, word: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, PlanError::InvalidArgument { .. }));
        assert!(error.to_string().contains(word), "{error}");
    };
    let lens = [[4, 3], [7, 5]];
    refused(RowMap::for_requests(&[], &none, &[], 0), "requests");
    refused(RowMap::for_requests(&[4], &lens, &[0, 4], 0), "padded");
    refused(RowMap::for_requests(&[4, 3], &lens, &[0], 0), "starts");
    refused(RowMap::for_requests(&[4, 3], &lens, &[0, 4], 2), "rank");
    let ragged = [vec![4, 3], vec![7]];
    refused(RowMap::for_requests(&[4, 3], &ragged, &[0, 4], 0), "ranks");
    let most = [[usize::MAX, usize::MAX]];
    refused(
        RowMap::for_requests(&[usize::MAX], &most, &[0], 0),
        "rows of the result",
    );
    let huge = RowMap::for_requests(&[MOST, 1], &[[0], [0]], &[0, 0], 0);
    refused(huge, "local rows");
    refused(RowMap::uneven(&[], 0), "rank");
    refused(RowMap::uneven(&[1, 2], 2), "rank");
    refused(RowMap::uneven(&[MOST, 1], 1), "rows");
    refused(RowMap::uneven(&[usize::MAX, usize::MAX], 0), "rows");
    refused(RowMap::from_rows(&[], MOST + 1), "rows");
    refused(RowMap::from_runs(vec![], MOST + 1, 0), "local rows");
}

#[test]
fn slots_are_no_more_than_there_can_be() {
    let table = [1, 0];
    let pages = Pages::dense(3, 64);
    assert_eq!(pages.slots(&table, 1..6), Ok(vec![4, 5, 0, 1, 2]));
    assert_eq!(pages.slots(&table, 6..6), Ok(vec![]));
    // Whole lists that end in what there is no slot for are refused before they are made.
    for (page_rows, rows) in [
        (3, 0..7),
        (3, 0..usize::MAX),
        (usize::MAX, 0..1 << 62),
        (0, 0..1),
    ] {
        let refused = Pages::dense(page_rows, 64).slots(&table, rows);
        assert!(matches!(refused, Err(PlanError::InvalidArgument { .. })));
    }
}
