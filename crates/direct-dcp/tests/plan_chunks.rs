//! Chunk plans: what they hold, what the budget comes to, what is refused, and how ranks compare
//! theirs.

use direct_dcp::plan::{ChunkPlan, ChunkPlanner, PlanError, RequestDigests, Sharding};

fn planner(ranks: usize, interleave: usize, block: usize, rows: usize) -> ChunkPlanner {
    ChunkPlanner::new(Sharding::new(ranks, interleave).unwrap(), block, rows).unwrap()
}

/// Of every part of every chunk: request, start, length, local start, padded length.
fn parts(plan: &ChunkPlan) -> Vec<Vec<[usize; 5]>> {
    let part = |part: &direct_dcp::plan::Part| {
        [
            part.request,
            part.start,
            part.len,
            part.local_start,
            part.padded_len,
        ]
    };
    plan.chunks()
        .iter()
        .map(|chunk| chunk.parts().iter().map(part).collect())
        .collect()
}

#[test]
fn budgets() {
    let sharding = Sharding::new(4, 1).unwrap();
    let budget = |len, seqs| {
        ChunkPlanner::for_model(sharding, 16, len, seqs)
            .unwrap()
            .budget_rows()
    };
    assert_eq!(budget(1_000, 1), 8_000);
    assert_eq!(budget(1_001, 1), 8_016);
    assert_eq!(budget(1, 256), 16_384);
    assert_eq!(budget(131_072, 256), 65_536);
    assert_eq!(budget(usize::MAX, usize::MAX), 65_536);
    // Nine ranks do not divide 65,536.
    let sharding = Sharding::new(9, 16).unwrap();
    let planner = ChunkPlanner::for_model(sharding, 64, 131_072, 256).unwrap();
    assert_eq!((planner.alignment(), planner.budget_rows()), (576, 65_664));
    assert_eq!(planner.sharding(), sharding);
}

#[test]
fn chunks_fill_up_in_the_order_of_requests() {
    // Cut at multiples of 8; 24 rows over both ranks, so 12 of each.
    let plan = planner(2, 2, 8, 20).plan(&[5, 0, 37, 3]).unwrap();
    assert_eq!(
        parts(&plan),
        [
            vec![[0, 0, 5, 0, 4], [2, 0, 16, 0, 8]],
            vec![[2, 16, 21, 8, 12]],
            vec![[3, 0, 3, 0, 2]],
        ]
    );
    let rows: Vec<_> = plan
        .chunks()
        .iter()
        .map(|chunk| (chunk.local_rows(), chunk.total_rows()))
        .collect();
    assert_eq!(rows, [(12, 21), (12, 21), (2, 3)]);
    let valid = |chunk: usize, part: usize| {
        let part = plan.chunks()[chunk].parts()[part];
        [0, 1, 2].map(|rank| part.valid_rows(rank))
    };
    assert_eq!(valid(0, 0), [3, 2, 0]);
    assert_eq!(valid(0, 1), [8, 8, 0]);
    assert_eq!(valid(1, 0), [11, 10, 0]);
    assert_eq!(valid(2, 0), [2, 1, 0]);
    assert_eq!(
        plan.chunks()[0].row_map(1).unwrap().dst_rows(),
        [3, 4, -1, -1, 13, 14, 15, 16, 17, 18, 19, 20]
    );
    assert!(plan.chunks()[0].row_map(2).is_err());
}

#[test]
fn five_windows() {
    let plan = planner(8, 1, 64, 24_576).plan(&[122_880]).unwrap();
    let starts: Vec<_> = parts(&plan).iter().map(|chunk| chunk[0][1]).collect();
    assert_eq!(starts, [0, 24_576, 49_152, 73_728, 98_304]);
}

#[test]
fn nothing_to_gather() {
    let planner = planner(2, 1, 1, 1);
    assert!(planner.plan(&[]).unwrap().chunks().is_empty());
    assert!(planner.plan(&[0, 0]).unwrap().chunks().is_empty());
    assert_eq!(planner.chunks(&[0]).next(), None);
}

#[test]
fn refusals() {
    let sharding = Sharding::new(2, 1).unwrap();
    let refused = |result: Result<ChunkPlanner, PlanError>, word: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(ChunkPlanner::new(sharding, 0, 1), "block");
    refused(ChunkPlanner::new(sharding, 1, 0), "budget");
    refused(ChunkPlanner::new(sharding, usize::MAX, 1), "multiple");
    refused(ChunkPlanner::new(sharding, 1, usize::MAX), "budget");
    refused(ChunkPlanner::new(sharding, 1, 1 << 31), "budget");
    refused(ChunkPlanner::new(sharding, 1 << 31, 1), "budget");
    refused(ChunkPlanner::for_model(sharding, 16, 0, 0), "budget");
    let planner = planner(2, 1, 1, 64);
    let error = planner.plan(&[1, usize::MAX]).unwrap_err().to_string();
    assert!(error.contains("context"), "{error}");
    // One by one, the largest context is as good as any.
    let first = planner.chunks(&[usize::MAX]).next().unwrap();
    assert_eq!((first.local_rows(), first.total_rows()), (32, 64));
}

#[test]
fn digests_name_the_request_that_differs() {
    let contexts = [5, 0, 37, 3];
    let ours = planner(2, 2, 8, 20).plan(&contexts).unwrap();
    let same = planner(2, 2, 8, 20).plan(&contexts).unwrap();
    assert_eq!(ours.digest(), same.digest());
    assert_eq!(ours.chunks()[1].digest(), same.chunks()[1].digest());
    assert_ne!(ours.chunks()[0].digest(), ours.chunks()[1].digest());

    let differs = |theirs: &ChunkPlan| {
        assert_ne!(ours.digest(), theirs.digest());
        // As it comes from a peer.
        let bytes = theirs.request_digests().to_bytes();
        let theirs = RequestDigests::from_bytes(&bytes).unwrap();
        let found = ours.request_digests().first_difference(&theirs);
        assert_eq!(found, theirs.first_difference(ours.request_digests()));
        found.unwrap()
    };
    let plan = |contexts: &[usize]| planner(2, 2, 8, 20).plan(contexts).unwrap();
    assert_eq!(differs(&plan(&[5, 0, 37, 4])), 3);
    assert_eq!(differs(&plan(&[5, 0, 38, 3])), 2);
    assert_eq!(differs(&plan(&[5, 1, 37, 3])), 1);
    assert_eq!(differs(&plan(&[5, 0, 37])), 3);
    assert_eq!(differs(&plan(&[5, 0, 37, 3, 0])), 4);
    assert_eq!(differs(&plan(&[])), 0);
    // Another interleave is another plan for all, another budget for those it cuts otherwise.
    assert_eq!(differs(&planner(2, 4, 8, 20).plan(&contexts).unwrap()), 0);
    assert_eq!(differs(&planner(2, 2, 8, 16).plan(&contexts).unwrap()), 2);

    let found = ours
        .request_digests()
        .first_difference(same.request_digests());
    assert_eq!(found, None);
    assert!(RequestDigests::from_bytes(&[0; 9]).is_err());
}

#[test]
fn digests_are_what_they_say() {
    let fnv = |words: &[u64]| {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in words.iter().flat_map(|word| word.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        hash
    };
    let plan = planner(2, 2, 8, 20).plan(&[5, 37]).unwrap();
    let requests = [
        fnv(&[2, 2, 2, 5, 0, 0, 5]),
        fnv(&[2, 2, 2, 37, 0, 0, 16, 1, 16, 21]),
    ];
    assert_eq!(plan.request_digests().as_slice(), requests);
    assert_eq!(plan.digest(), fnv(&[3, requests[0], requests[1]]));
    assert_eq!(
        plan.chunks()[0].digest(),
        fnv(&[1, 2, 2, 0, 0, 5, 1, 0, 16])
    );
}
