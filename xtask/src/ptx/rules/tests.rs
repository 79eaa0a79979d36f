//! Each rule with a module that obeys it, and the same module changed until it does not.

use super::*;

const UNICAST: Expected = Expected {
    version: "7.0",
    target: "sm_80",
    multicast: false,
};
const MULTICAST: Expected = Expected {
    version: "8.1",
    target: "sm_90",
    multicast: true,
};

/// A gather as the compiler might write it.
pub(crate) const GOOD: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry direct_dcp_gather_into_16(
	.param .b64 direct_dcp_gather_into_16_param_0
)
{
	.reg .pred 	%p<9>;
	ld.param.b64 	%rd1, [direct_dcp_gather_into_16_param_0];
$COPY:
	ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
	st.global.v4.u32 [%rd2], {%r1, %r2, %r3, %r4};
	@%p1 bra 	$COPY;
	barrier.sync 0;
	@%p2 bra 	$VOTE;
	atom.acq_rel.gpu.global.add.u32 %r5, [%rd3], 1;
	st.global.u32 [%rd3], 0;
$VOTE:
	{
	.reg .pred %vote;
	barrier.red.or.pred %p3, 0, %vote;
	}
	@%p3 bra 	$FOLLOW;
	st.global.v4.u32 [%rd4], {%r1, %r2, %r3, %r4};
	st.release.sys.global.u32 [%rd5], %r6;
$WAIT:
	ld.acquire.sys.global.u32 %r7, [%rd6];
	@%p4 bra 	$WAIT;
	ld.global.u64 %rd7, [%rd8];
	barrier.red.or.pred %p5, 0, %p4;
	@%p6 bra 	$FAILED;
	st.release.gpu.global.u64 [%rd9], %rd10;
	bra.uni 	$TAKE;
$FAILED:
	atom.acq_rel.gpu.global.cas.b32 %r8, [%rd11], 0, 1;
	st.release.gpu.global.u32 [%rd12], 1;
	st.release.sys.global.u32 [%rd13], 1;
	ret;
$FOLLOW:
	ld.acquire.gpu.global.u64 %rd14, [%rd9];
	@%p7 bra 	$FOLLOW;
$TAKE:
	barrier.sync 0;
	ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd15];
	st.global.v4.u32 [%rd16], {%r1, %r2, %r3, %r4};
	ret;
}
";

/// The same for the multicast module.
fn good_multicast() -> String {
    GOOD.replace(".version 7.0", ".version 8.1")
        .replace(".target sm_80", ".target sm_90")
        .replacen(
            "st.global.v4.u32",
            "multimem.st.relaxed.sys.global.v4.f32",
            1,
        )
        .replace(
            "\tst.release.sys.global.u32 [%rd5]",
            "\tfence.proxy.alias;\n\tmultimem.st.release.sys.global.u32 [%rd5]",
        )
        .replace("[%rd6];\n", "[%rd6];\n\tfence.proxy.alias;\n")
}

fn wrong(text: &str, expected: Expected) -> Vec<String> {
    check(&Module::parse(text).unwrap(), expected)
}

/// Asserts that `good`, with `from` replaced by `to`, is refused for `reason`.
fn refused(good: &str, expected: Expected, from: &str, to: &str, reason: &str) {
    let bad = good.replacen(from, to, 1);
    assert_ne!(bad, good, "`{from}` is not there");
    let wrong = wrong(&bad, expected);
    assert!(
        wrong.iter().any(|message| message.contains(reason)),
        "`{from}` -> `{to}`: {wrong:?}"
    );
}

#[test]
fn good_modules_pass() {
    assert_eq!(wrong(GOOD, UNICAST), [""; 0]);
    assert_eq!(wrong(&good_multicast(), MULTICAST), [""; 0]);
}

#[test]
fn what_may_not_be_said_is_refused() {
    for (from, to, reason) in [
        (".version 7.0", ".version 7.1", "expected 7.0"),
        (".target sm_80", ".target sm_75", "expected 7.0 for sm_80"),
        ("\tret;", "\ttrap;", "every later call"),
        (
            "\tret;",
            "\tcall.uni vprintf, (%rd1);",
            "should have been inlined",
        ),
        ("\tret;", "\tmembar.sys;\n\tret;", "old model"),
        ("\tret;", "\tst.local.u32 [%rd1], %r1;", "local memory"),
        (
            ".reg .pred \t%p<9>",
            ".local .align 4 .b8 stack[4]",
            "local memory",
        ),
        ("ld.global.v4.u32", "ld.global.nc.v4.u32", "coherent caches"),
        (
            "\tret;",
            "\tmultimem.st.relaxed.sys.global.u32 [%rd1], %r1;",
            "multicast module",
        ),
        (
            "atom.acq_rel.gpu.global.cas",
            "atom.global.cas",
            "orders nothing",
        ),
        (
            "atom.acq_rel.gpu.global.cas",
            "atom.relaxed.gpu.global.cas",
            "orders nothing",
        ),
        (
            "atom.acq_rel.gpu.global.cas",
            "red.global.or",
            "orders nothing",
        ),
        (
            ".address_size 64",
            ".address_size 64\n.global .b32 x;",
            "outside of functions",
        ),
        (
            ".address_size 64",
            ".address_size 64\n.func f()\n{\n\tret;\n}",
            "no entry point",
        ),
        ("direct_dcp_gather_into_16(", "other(", "says nothing"),
        ("bra.uni \t$TAKE", "bra.uni \t$NOWHERE", "no label"),
    ] {
        refused(GOOD, UNICAST, from, to, reason);
    }
}

#[test]
fn steps_that_are_missing_are_refused() {
    let release = "st.release.sys.global.u32 [%rd5]";
    for (from, to, reason) in [
        ("@%p1 bra \t$COPY", "nop", "no loop loads and stores"),
        (
            "ld.global.v4.u32",
            "ld.global.u32",
            "no loop loads and stores",
        ),
        (
            "atom.acq_rel.gpu.global.add",
            "atom.acquire.gpu.global.add",
            "acq_rel count",
        ),
        (
            release,
            "st.relaxed.sys.global.u32 [%rd5]",
            "release to the peers",
        ),
        (
            release,
            "st.release.gpu.global.u32 [%rd5]",
            "release to the peers",
        ),
        ("ld.acquire.sys", "ld.relaxed.sys", "acquire of theirs"),
        ("ld.acquire.sys", "ld.acquire.gpu", "acquire of theirs"),
    ] {
        refused(GOOD, UNICAST, from, to, reason);
    }
    let eager = GOOD.replace("gather_into_16", "gather_16");
    let wrong_eager = wrong(&eager, UNICAST);
    assert!(
        wrong_eager[0].contains("not the last waits"),
        "{wrong_eager:?}"
    );
    let uncopied = GOOD.replace("ld.acquire.gpu", "ld.relaxed.gpu");
    let wrong_uncopied = wrong(&uncopied, UNICAST);
    assert!(
        wrong_uncopied[0].contains("copy of the peers"),
        "{wrong_uncopied:?}"
    );
    let narrow = GOOD.replace("into_16", "into_8");
    let wrong_narrow = wrong(&narrow, UNICAST);
    assert!(wrong_narrow[0].contains("no loop"), "{wrong_narrow:?}");
    assert!(wrong_narrow.last().unwrap().contains("16 bytes at a time"));
    let unended = GOOD.replace("st.release.gpu", "st.relaxed.gpu");
    let wrong = wrong(&unended, UNICAST);
    assert!(wrong[0].contains("release of the epoch"), "{wrong:?}");
}

#[test]
fn steps_in_another_order_are_refused() {
    for (from, to, reason) in [
        ("\tbarrier.sync 0;", "", "from a store to the count"),
        // A path round the barrier is as bad as none.
        (
            "\tbarrier.sync 0;",
            "\t@%p8 bra \t$VOTE;\n\tbarrier.sync 0;",
            "to a vote past no barrier before it",
        ),
        (
            "\tatom",
            "\tst.global.u32 [%rd1], 0;\n\tatom",
            "from a store to the count",
        ),
        (
            "\tld.param",
            "\t@%p8 bra \t$WAIT;\n\tld.param",
            "to an acquire of the peers past no barrier",
        ),
        ("barrier.red", "barrier.sync", "past no vote"),
        (
            "\tret;",
            "\tst.release.sys.global.u32 [%rd5], %r6;\n\tbra \t$WAIT;",
            "back to a release",
        ),
        (
            "\tbarrier.red.or.pred %p5, 0, %p4;",
            "",
            "release of the epoch past no barrier",
        ),
        (
            "$TAKE:\n\tbarrier.sync 0;",
            "$TAKE:",
            "to a load of rows past no barrier",
        ),
    ] {
        refused(GOOD, UNICAST, from, to, reason);
    }
}

#[test]
fn a_multicast_module_without_alias_fences_is_refused() {
    let good = good_multicast();
    let fence = "\tfence.proxy.alias;\n";
    refused(&good, MULTICAST, fence, "", "to the multicast release");
    let store = "\tmultimem.st.relaxed.sys.global.v4.f32 [%rd4], {%r1, %r2, %r3, %r4};\n";
    let late = [fence, store].concat();
    refused(&good, MULTICAST, fence, &late, "to the multicast release");
    let last = good.rfind(fence).unwrap();
    let unread = [&good[..last], &good[last + fence.len()..]].concat();
    let wrong = wrong(&unread, MULTICAST);
    assert!(wrong[0].contains("to a reader"), "{wrong:?}");
}
