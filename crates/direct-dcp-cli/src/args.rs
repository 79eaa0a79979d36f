//! Values on the command line.

/// A number of ranks.
pub(crate) fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 2..=1024) => Ok(ranks),
        _ => Err("a group has 2 to 1024 ranks".into()),
    }
}

/// A number that is not 0.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..) => Ok(number),
        _ => Err("a positive whole number is wanted".into()),
    }
}

/// How often something is done.
pub(crate) fn iterations(text: &str) -> Result<usize, String> {
    times(text, 1)
}

/// How often something is done, if at all.
pub(crate) fn iterations_or_none(text: &str) -> Result<usize, String> {
    times(text, 0)
}

fn times(text: &str, least: usize) -> Result<usize, String> {
    const MOST: usize = 1_000_000;
    let number = text.parse().ok();
    number
        .filter(|number| (least..=MOST).contains(number))
        .ok_or_else(|| format!("a number from {least} to {MOST} is wanted"))
}

/// Bytes: a number, with K, M or G behind it for 1024 and its powers.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let wrong = || String::from("a size is a positive number, like 4096, 4K, 1M or 2G");
    let text = text.trim().to_ascii_uppercase();
    let text = text.strip_suffix('B').unwrap_or(&text);
    let text = text.strip_suffix('I').unwrap_or(text);
    let (digits, shift) = match text.chars().last().ok_or_else(wrong)? {
        'K' => (&text[..text.len() - 1], 10),
        'M' => (&text[..text.len() - 1], 20),
        'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().map_err(|_| wrong())?;
    match number.checked_mul(1 << shift) {
        Some(bytes @ 1..) => Ok(bytes),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("1m"), Ok(1 << 20));
        assert_eq!(size("2GiB"), Ok(2 << 30));
        for wrong in ["", "0", "K", "-1", "1.5M", "99999999999G", "1T", "ﬀ"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
