//! Known litmus tests, so that the protocol's verdicts can be trusted.

use Scope::{Cta, Gpu, Sys};
use Sem::{AcqRel, Acquire, Relaxed, Release, Sc, Weak};
use direct_dcp_litmus::model::{Axiom, Block, Model, Program, ReadsFrom, Scope, Sem, ThreadId};

const A: Block = Block { gpu: 0, index: 0 };
const B: Block = Block { gpu: 0, index: 1 };
const FAR: Block = Block { gpu: 1, index: 0 };

fn allows(program: &Program, outcome: &[ReadsFrom]) -> bool {
    Model::default().allows(program, outcome)
}

/// Forbidden, and by these axioms: without them the outcome would be allowed.
fn assert_forbidden_by(axioms: &'static [Axiom], program: &Program, outcome: &[ReadsFrom]) {
    assert!(
        !allows(program, outcome),
        "allowed, though {axioms:?} should forbid it"
    );
    let without = Model {
        without: axioms,
        ..Model::default()
    };
    assert!(
        without.allows(program, outcome),
        "forbidden even without {axioms:?}"
    );
}

fn fence(p: &mut Program, thread: ThreadId, sem: Option<Sem>) {
    if let Some(sem) = sem {
        p.fence(thread, sem);
    }
}

/// Message passing with fences; the outcome is the flag seen, the data not.
fn mp_fences(writer: Option<Sem>, reader: Option<Sem>, far: Block) -> (Program, [ReadsFrom; 2]) {
    let mut p = Program::new();
    let (data, flag) = (p.location(), p.location());
    let w = p.thread(A);
    p.store(w, data, Weak);
    fence(&mut p, w, writer);
    let publish = p.store(w, flag, Relaxed(Sys));
    let r = p.thread(far);
    let observe = p.load(r, flag, Relaxed(Sys));
    fence(&mut p, r, reader);
    let read = p.load(r, data, Weak);
    (p, [observe.from(publish), read.initial()])
}

#[test]
fn mp_needs_a_fence_on_both_sides() {
    let f = Some(AcqRel(Sys));
    let (p, stale) = mp_fences(f, f, B);
    assert_forbidden_by(&[Axiom::Causality], &p, &stale);
    for (writer, reader) in [(None, f), (f, None), (None, None)] {
        let (p, stale) = mp_fences(writer, reader, B);
        assert!(allows(&p, &stale), "{writer:?} {reader:?}");
    }
}

#[test]
fn mp_fences_may_point_one_way() {
    let (p, stale) = mp_fences(Some(Release(Sys)), Some(Acquire(Sys)), B);
    assert!(!allows(&p, &stale));
    let (p, stale) = mp_fences(Some(Acquire(Sys)), Some(Release(Sys)), B);
    assert!(allows(&p, &stale));
}

#[test]
fn mp_scopes_must_include_the_other_thread() {
    for (scope, near_stale, far_stale) in
        [(Cta, true, true), (Gpu, false, true), (Sys, false, false)]
    {
        let f = Some(AcqRel(scope));
        let (p, stale) = mp_fences(f, f, B);
        assert_eq!(allows(&p, &stale), near_stale, "{scope:?}, one GPU");
        let (p, stale) = mp_fences(f, f, FAR);
        assert_eq!(allows(&p, &stale), far_stale, "{scope:?}, two GPUs");
    }
}

#[test]
fn mp_with_release_and_acquire() {
    for (publish_sem, observe_sem, stale) in [
        (Release(Sys), Acquire(Sys), false),
        (Relaxed(Sys), Acquire(Sys), true),
        (Release(Sys), Relaxed(Sys), true),
        (Release(Sys), Weak, true),
        (Weak, Acquire(Sys), true),
    ] {
        let mut p = Program::new();
        let (data, flag) = (p.location(), p.location());
        let w = p.thread(A);
        let store = p.store(w, data, Weak);
        let publish = p.store(w, flag, publish_sem);
        let r = p.thread(FAR);
        let observe = p.load(r, flag, observe_sem);
        let read = p.load(r, data, Weak);
        let seen = observe.from(publish);
        assert_eq!(
            allows(&p, &[seen, read.initial()]),
            stale,
            "{publish_sem:?} {observe_sem:?}"
        );
        assert!(allows(&p, &[seen, read.from(store)]));
    }
}

#[test]
fn a_release_extends_to_later_strong_writes_of_the_same_address() {
    let mut p = Program::new();
    let (data, flag) = (p.location(), p.location());
    let w = p.thread(A);
    p.store(w, data, Weak);
    p.store(w, flag, Release(Sys));
    let again = p.store(w, flag, Relaxed(Sys));
    let r = p.thread(FAR);
    let observe = p.load(r, flag, Acquire(Sys));
    let read = p.load(r, data, Weak);
    assert!(!allows(&p, &[observe.from(again), read.initial()]));
}

#[test]
fn a_release_is_observed_through_atomics_but_not_through_plain_writes() {
    for atomic in [true, false] {
        let mut p = Program::new();
        let (data, flag) = (p.location(), p.location());
        let w = p.thread(A);
        p.store(w, data, Weak);
        let publish = p.store(w, flag, Release(Sys));
        let middle = p.thread(B);
        let (hop, passed_on) = if atomic {
            let a = p.atom(middle, flag, Relaxed(Sys));
            (a.read, a.write)
        } else {
            (
                p.load(middle, flag, Relaxed(Sys)),
                p.store(middle, flag, Relaxed(Sys)),
            )
        };
        let r = p.thread(FAR);
        let observe = p.load(r, flag, Acquire(Sys));
        let read = p.load(r, data, Weak);
        let outcome = [hop.from(publish), observe.from(passed_on), read.initial()];
        assert_eq!(allows(&p, &outcome), !atomic);
    }
}

#[test]
fn wrc_and_isa2_are_cumulative() {
    // The data goes through a thread that never touches it.
    for (hop_sem, stale) in [(Acquire(Sys), false), (Relaxed(Sys), true)] {
        let mut p = Program::new();
        let (data, first, second) = (p.location(), p.location(), p.location());
        let w = p.thread(A);
        p.store(w, data, Weak);
        let one = p.store(w, first, Release(Sys));
        let middle = p.thread(B);
        let hop = p.load(middle, first, hop_sem);
        let two = p.store(middle, second, Release(Sys));
        let r = p.thread(FAR);
        let observe = p.load(r, second, Acquire(Sys));
        let read = p.load(r, data, Weak);
        let outcome = [hop.from(one), observe.from(two), read.initial()];
        assert_eq!(allows(&p, &outcome), stale, "{hop_sem:?}");
    }
}

#[test]
fn sb_needs_fence_sc() {
    for (sem, both_old) in [(Sc(Sys), false), (AcqRel(Sys), true)] {
        let mut p = Program::new();
        let (x, y) = (p.location(), p.location());
        let t = p.thread(A);
        p.store(t, x, Weak);
        p.fence(t, sem);
        let read_y = p.load(t, y, Weak);
        let u = p.thread(B);
        p.store(u, y, Weak);
        p.fence(u, sem);
        let read_x = p.load(u, x, Weak);
        let outcome = [read_y.initial(), read_x.initial()];
        assert_eq!(allows(&p, &outcome), both_old, "{sem:?}");
        if !both_old {
            assert_forbidden_by(&[Axiom::Causality], &p, &outcome);
        }
    }
}

#[test]
fn iriw_needs_fence_sc() {
    for (sem, disagree) in [(Sc(Sys), false), (AcqRel(Sys), true)] {
        let mut p = Program::new();
        let (x, y) = (p.location(), p.location());
        let wx = p.thread(A);
        let set_x = p.store(wx, x, Relaxed(Sys));
        let wy = p.thread(B);
        let set_y = p.store(wy, y, Relaxed(Sys));
        let mut outcome = Vec::new();
        for (block, first, second, set) in [
            (FAR, x, y, set_x),
            (Block { gpu: 1, index: 1 }, y, x, set_y),
        ] {
            let r = p.thread(block);
            let seen = p.load(r, first, Relaxed(Sys));
            p.fence(r, sem);
            let missed = p.load(r, second, Relaxed(Sys));
            outcome.extend([seen.from(set), missed.initial()]);
        }
        assert_eq!(allows(&p, &outcome), disagree, "{sem:?}");
    }
}

#[test]
fn corr_reads_of_one_location_do_not_go_back() {
    for (sem, goes_back) in [(Relaxed(Sys), false), (Weak, true)] {
        let mut p = Program::new();
        let x = p.location();
        let w = p.thread(A);
        let write = p.store(w, x, sem);
        let r = p.thread(FAR);
        let first = p.load(r, x, sem);
        let second = p.load(r, x, sem);
        let outcome = [first.from(write), second.initial()];
        assert_eq!(allows(&p, &outcome), goes_back, "{sem:?}");
        if !goes_back {
            // Twice forbidden: the first read also puts the write before the second in causality.
            for axiom in [&[Axiom::ScPerLocation], &[Axiom::Causality]] {
                assert!(
                    !Model {
                        without: axiom,
                        ..Model::default()
                    }
                    .allows(&p, &outcome)
                );
            }
            assert_forbidden_by(&[Axiom::ScPerLocation, Axiom::Causality], &p, &outcome);
        }
    }
}

#[test]
fn cowr_through_an_alias_needs_an_alias_fence() {
    for fenced in [false, true] {
        let mut p = Program::new();
        let x = p.location();
        let t = p.thread(A);
        let write = p.store(t, x.alias(), Weak);
        if fenced {
            p.alias_fence(t);
        }
        let read = p.load(t, x, Weak);
        assert_eq!(allows(&p, &[read.initial()]), !fenced);
        assert!(allows(&p, &[read.from(write)]));
    }
    let mut p = Program::new();
    let x = p.location();
    let t = p.thread(A);
    p.store(t, x, Weak);
    let read = p.load(t, x, Weak);
    assert!(!allows(&p, &[read.initial()]), "one address needs no fence");
}

#[test]
fn a_memory_fence_is_not_an_alias_fence() {
    let mut p = Program::new();
    let x = p.location();
    let t = p.thread(A);
    p.store(t, x.alias(), Weak);
    p.fence(t, Sc(Sys));
    let read = p.load(t, x, Weak);
    assert!(allows(&p, &[read.initial()]));
}

#[test]
fn coherence_orders_writes_that_causality_orders() {
    let mut p = Program::new();
    let (x, flag) = (p.location(), p.location());
    let t = p.thread(A);
    let first = p.store(t, x, Weak);
    let publish = p.store(t, flag, Release(Sys));
    let u = p.thread(B);
    let observe = p.load(u, flag, Acquire(Sys));
    p.store(u, x, Weak);
    let read = p.load(u, x, Weak);
    let outcome = [observe.from(publish), read.from(first)];
    assert_forbidden_by(&[Axiom::Coherence], &p, &outcome);
}

#[test]
fn atomics_lose_no_update_unless_a_scope_is_too_small() {
    for (other, lost) in [(Sys, false), (Cta, true)] {
        let mut p = Program::new();
        let x = p.location();
        let t = p.thread(A);
        let one = p.atom(t, x, Relaxed(other));
        let u = p.thread(B);
        let two = p.atom(u, x, Relaxed(Sys));
        let outcome = [one.read.initial(), two.read.initial()];
        assert_eq!(allows(&p, &outcome), lost, "{other:?}");
        if !lost {
            assert_forbidden_by(&[Axiom::Atomicity], &p, &outcome);
        }
    }
}

#[test]
fn lb_is_allowed_only_without_dependencies() {
    for depends in [false, true] {
        let mut p = Program::new();
        let (x, y) = (p.location(), p.location());
        let t = p.thread(A);
        let (read_x, write_y) = (p.load(t, x, Weak), p.store(t, y, Weak));
        let u = p.thread(B);
        let (read_y, write_x) = (p.load(u, y, Weak), p.store(u, x, Weak));
        if depends {
            p.depends(read_x, write_y);
            p.depends(read_y, write_x);
        }
        let outcome = [read_x.from(write_x), read_y.from(write_y)];
        assert_eq!(allows(&p, &outcome), !depends);
        if depends {
            assert_forbidden_by(&[Axiom::NoThinAir], &p, &outcome);
        }
    }
}

#[test]
fn barriers_order_one_block_and_kernel_boundaries_order_a_stream() {
    for (writer, reader, stale) in [(A, A, false), (A, B, true)] {
        let mut p = Program::new();
        let x = p.location();
        let t = p.thread(writer);
        p.store(t, x, Weak);
        p.barrier(t, 0);
        let u = p.thread(reader);
        p.barrier(u, 0);
        let read = p.load(u, x, Weak);
        assert_eq!(allows(&p, &[read.initial()]), stale);
    }
    for (address_of_store_is_alias, api_orders_aliases, stale) in [
        (false, false, false),
        (true, true, false),
        (true, false, true),
    ] {
        let mut p = Program::new();
        let x = p.location();
        let t = p.thread(A);
        p.store(
            t,
            if address_of_store_is_alias {
                x.alias()
            } else {
                x
            },
            Weak,
        );
        let end = p.boundary(t);
        let u = p.thread(B);
        let start = p.boundary(u);
        let read = p.load(u, x, Weak);
        p.api_order(end, start);
        let model = Model {
            api_orders_aliases,
            ..Model::default()
        };
        assert_eq!(model.allows(&p, &[read.initial()]), stale);
    }
}

#[test]
fn by_the_letter_a_signal_through_an_alias_synchronizes_nothing() {
    for strong_through_aliases in [false, true] {
        let mut p = Program::new();
        let (data, flag) = (p.location(), p.location());
        let w = p.thread(A);
        p.store(w, data, Weak);
        let publish = p.store(w, flag.alias(), Release(Sys));
        let r = p.thread(FAR);
        let observe = p.load(r, flag, Acquire(Sys));
        let read = p.load(r, data, Weak);
        let model = Model {
            strong_through_aliases,
            ..Model::default()
        };
        let stale = model.allows(&p, &[observe.from(publish), read.initial()]);
        assert_eq!(stale, !strong_through_aliases);
    }
}
