//! What users of nccl-tests know: flags that name a range of sizes, and columns of a table.

use clap::{Arg, ArgMatches};
use pushgate::Error;
use pushgate::settings::parse_size;

/// Most bytes of a collective.
pub const MOST: u64 = 64 << 30;

/// The flags `-b`, `-e` and `-f`. `defaults`: smallest size, largest size and factor where a flag is not given.
pub fn range_flags(defaults: [&'static str; 3]) -> [Arg; 3] {
    let [min, max, factor] = defaults;
    let arg = |short: char, name: &'static str, value: &'static str, help: String| {
        Arg::new(name).short(short).long(name).value_name(value).help(help)
    };
    [
        arg('b', "minbytes", "MIN", format!("Smallest size (1024-based: 8, 1K, 1G) [default: {min}]")),
        arg('e', "maxbytes", "MAX", format!("Largest size [default: {max}]")),
        arg(
            'f',
            "stepfactor",
            "FACTOR",
            format!("Each size is the one before times this [default: {factor}]"),
        ),
    ]
}

/// The sizes of `-b`, `-e` and `-f`; `None` where none of the three flags is given.
///
/// `element`: bytes of an element. Every size is whole elements. Without `-e` the largest size is the default, or the
/// smallest size where that is larger.
pub fn range(m: &ArgMatches, element: u64, defaults: [&str; 3]) -> Result<Option<Vec<u64>>, Error> {
    let given = |name: &str| m.get_one::<String>(name).map(String::as_str);
    if ["minbytes", "maxbytes", "stepfactor"].into_iter().all(|name| given(name).is_none()) {
        return Ok(None);
    }
    let size = |name: &str| -> Result<Option<u64>, Error> {
        let Some(text) = given(name) else { return Ok(None) };
        match parse_size(text).filter(|bytes| *bytes > 0 && *bytes <= MOST && bytes % element == 0) {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(Error::flag(
                name,
                text,
                format!("a multiple of {element}, at most 64G, as in 8, 1K or 1G"),
            )),
        }
    };
    let default = |at: usize| parse_size(defaults[at]).expect("defaults are sizes");
    let min = size("minbytes")?;
    let max = size("maxbytes")?.unwrap_or_else(|| default(1).max(min.unwrap_or(0)));
    let min = min.unwrap_or_else(|| default(0).min(max));
    if max < min {
        let text = given("maxbytes").unwrap_or_default();
        return Err(Error::flag("maxbytes", text, format!("at least minbytes, which is {min}")));
    }
    let factor = match given("stepfactor") {
        None => default(2),
        Some(text) => (text.parse().ok().filter(|factor| (2..=1 << 30).contains(factor)))
            .ok_or_else(|| Error::flag("stepfactor", text, "2 to 1073741824"))?,
    };
    let next = |size: &u64| size.checked_mul(factor).filter(|size| *size <= max);
    Ok(Some(std::iter::successors(Some(min), next).collect()))
}

/// A number as nccl-tests prints it: with as many decimals as fit into the width, at most two.
pub fn number(value: f64, width: usize) -> String {
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:width$.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:width$.0e}"))
}

/// Names and units of the columns that every line begins with.
pub const TITLES: [[&str; 5]; 2] =
    [["size", "count", "type", "redop", "root"], ["(B)", "(elements)", "", "", ""]];
/// Names and units of the columns of a run.
pub const RUN_TITLES: [[&str; 4]; 2] =
    [["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]];

/// Names above the columns that every line begins with: size, count, type, redop, root.
pub fn titles(words: [&str; 5]) -> String {
    let [size, count, dtype, redop, root] = words;
    format!("# {size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}")
}

/// The columns that every line begins with.
pub fn case(size: u64, count: u64, dtype: &str, redop: &str, root: i32) -> String {
    format!("{size:>12}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}")
}

/// Names above the [`columns`] of a run.
pub fn run_titles(words: [&str; 4]) -> String {
    let [time, algbw, busbw, wrong] = words;
    format!("  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}")
}

/// The columns of one kind of run: microseconds, algbw and busbw in GB/s (10^9 bytes a second), wrong elements.
pub fn columns(run: Option<(f64, f64, f64, u64)>) -> String {
    match run {
        Some((us, algbw, busbw, wrong)) => {
            format!("  {}  {}  {}  {wrong:>6}", number(us, 7), number(algbw, 6), number(busbw, 6))
        }
        None => run_titles(["-"; 4]),
    }
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    fn sizes(args: &str) -> Result<Option<Vec<u64>>, Error> {
        let defaults = ["8", "64", "2"];
        let words = ["program"].into_iter().chain(args.split_whitespace());
        let m = Command::new("program").args(range_flags(defaults)).get_matches_from(words);
        range(&m, 4, defaults)
    }

    #[test]
    fn a_range_is_multiplied_up_to_its_end() {
        for (args, expected) in [
            ("-b 8 -e 1K -f 4", vec![8, 32, 128, 512]),
            ("-b 1K -e 4K", vec![1024, 2048, 4096]),
            ("-f 8", vec![8, 64]),
            ("-b 32", vec![32, 64]),
            ("-e 4", vec![4]),
            ("-b 1M", vec![1 << 20]),
            ("-b 12 -e 12 -f 1073741824", vec![12]),
            ("-b 16G -e 64G", vec![16 << 30, 32 << 30, 64 << 30]),
        ] {
            assert_eq!(sizes(args).unwrap(), Some(expected), "{args}");
        }
        assert_eq!(sizes("").unwrap(), None);
        for args in
            ["-b 0", "-b 6", "-e 65G", "-b 1T", "-f 0", "-f 1", "-f 2.5", "-f 2147483648", "-b 16 -e 8"]
        {
            assert!(sizes(args).is_err(), "{args}");
        }
    }

    #[test]
    fn numbers_lose_decimals_before_they_leave_their_column() {
        for (value, width, text) in [
            (20.934, 7, "  20.93"),
            (0.0004, 6, "  0.00"),
            (1234.567, 6, "1234.6"),
            (12345.678, 6, " 12346"),
            (123456.78, 6, "123457"),
            (1234567.0, 6, "   1e6"),
        ] {
            assert_eq!(number(value, width), text);
        }
        assert_eq!(columns(Some((20.934, 1.5, 3.0, 0))), "    20.93    1.50    3.00       0");
        assert_eq!(columns(None), "        -       -       -       -");
        assert_eq!(columns(None).len(), columns(Some((1e9, 1e9, 1e9, 7))).len());
    }
}
