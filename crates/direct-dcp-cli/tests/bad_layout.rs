//! Layouts that cannot be are refused in one line that has the word to search for.

mod common;

use common::{example, run};

#[test]
fn layouts_that_cannot_be() {
    for (command, options, status, word) in [
        ("gather", "--requests 256", 2, "--layout request-major"),
        ("gather", "--chunk-rows 64", 2, "--layout request-major"),
        ("gather", "--planes 384,384", 2, "--layout request-major"),
        ("gather", "--paged 16", 2, "--layout request-major"),
        ("gather", "--layout sideways", 2, "request-major"),
        (
            "gather",
            "RM --requests 200,55",
            1,
            "255 rows, and the tensor has 256",
        ),
        (
            "gather",
            "RM --requests 18446744073709551615,2",
            1,
            "--requests",
        ),
        ("gather", "RM --requests 200,x", 2, "--requests"),
        ("gather", "RM --requests=-1,257", 2, "--requests"),
        ("gather", "RM --requests ,", 2, "--requests"),
        ("gather", "RM --chunk-rows 0", 2, "positive"),
        ("gather", "RM --chunk-rows few", 2, "positive"),
        ("gather", "RM --planes 384,383", 1, "add up to 768 elements"),
        (
            "gather",
            "RM --planes 1,1,1,1,764",
            1,
            "1 to 4 positive widths",
        ),
        ("gather", "RM --planes 768,0", 2, "positive"),
        (
            "gather",
            "RM --planes 18446744073709551615,769",
            1,
            "planes",
        ),
        ("gather", "RM --paged 0", 2, "positive"),
        ("gather", "RM --paged 1000000000", 1, "of memory"),
        ("gather", "RM --paged 18446744073709551615", 1, "pages"),
        ("gather", "RM --interleave 99999999999", 1, "interleave"),
        ("gather", "RM --way pull", 2, "--way pull"),
        ("gather", "RM --backend cuda", 1, "no NVIDIA driver"),
        (
            "gather",
            "RM --backend cuda-processes --way staged",
            2,
            "--way staged",
        ),
        (
            "gather",
            "RM --backend cuda --paged 4 --way copy-engine",
            2,
            "--way copy-engine",
        ),
        ("gather", "RM --backend cuda --way pull", 2, "--way pull"),
        ("bench", "--planes 1024,128", 2, "--layout request-major"),
        ("bench", "--requests 8", 2, "--layout request-major"),
        ("bench", "RM --planes 1024,127", 2, "add up to 1152"),
        ("bench", "RM --planes 1152,0", 2, "positive"),
        (
            "bench",
            "RM --planes 1,1,1,1,1148",
            2,
            "1 to 4 positive widths",
        ),
        ("bench", "RM --requests 0", 2, "positive"),
        ("bench", "RM --way push,pull", 2, "--way pull"),
        ("bench", "RM --backend cuda", 1, "no NVIDIA driver"),
        (
            "bench",
            "RM --backend cuda --way push,staged",
            2,
            "--way staged",
        ),
        ("bench", "--pipeline --backend cuda", 1, "no NVIDIA driver"),
        ("bench", "--pipeline -G 2", 2, "--cudagraph"),
        ("bench", "RM --blocks 2", 2, "--blocks"),
        ("bench", "RM --rows 18446744073709551615", 1, "memory"),
        ("bench", "RM --trace trace.jsonl", 2, "--trace"),
    ] {
        let options = options.replace("RM", "--layout request-major");
        let mut args = vec![command];
        let file = example();
        args.extend((command == "gather").then_some(file.to_str().unwrap()));
        args.extend(options.split(' '));
        let ended = run(&args);
        assert_eq!(ended.status.code(), Some(status), "{args:?}: {ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{args:?}: {ended:?}");
        assert!(
            ended.stderr.starts_with("error: ") && ended.stderr.contains(word),
            "{args:?}: {ended:?}"
        );
        assert!(ended.stdout.is_empty(), "{ended:?}");
    }
}
