//! Slurm's way to write lists: hosts as in `node[01-03,7],gpu1`, counts as in `2(x3),1`.

/// The most hosts or nodes that a list may have. A job has fewer ranks than that.
const MOST: usize = 1 << 16;

/// The longest name of a host, its numbers aside, bytes: each of [`MOST`] hosts has it. Linux has names of 64.
const LONGEST: usize = 128;
/// The most pairs of brackets of a name: each pair takes a stretch of the stack.
const MOST_BRACKETS: usize = 4;

/// The hosts of a list, in order. An error says what is wrong with the list.
pub(super) fn hosts(list: &str) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    for entry in split(list)? {
        let outside =
            entry.split('[').map(|part| part.split_once(']').map_or(part, |(_, after)| after).len());
        if outside.sum::<usize>() > LONGEST {
            return Err(format!("it has a name of more than {LONGEST} bytes"));
        }
        if entry.matches('[').count() > MOST_BRACKETS {
            return Err(format!("it has a name with more than {MOST_BRACKETS} brackets"));
        }
        all.extend(expand(entry, MOST - all.len())?);
    }
    if all.is_empty() { Err("it names no host".into()) } else { Ok(all) }
}

/// Splits at the commas outside of brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let (mut entries, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return Err("it has a [ within brackets".into()),
            ']' if !inside => return Err("it has a ] without a [".into()),
            '[' | ']' => inside = c == '[',
            ',' if !inside => {
                entries.push(&list[start..at]);
                start = at + 1;
            }
            c if c.is_whitespace() || c.is_control() => return Err("it has a blank".into()),
            _ => {}
        }
    }
    if inside {
        return Err("it has a [ without a ]".into());
    }
    entries.push(&list[start..]);
    Ok(entries)
}

/// The hosts of an entry, at most `most`: each pair of brackets stands for every one of its numbers.
fn expand(entry: &str, most: usize) -> Result<Vec<String>, String> {
    let many = || format!("it names more than {MOST} hosts");
    if entry.is_empty() {
        return Err("it has an empty name".into());
    }
    let Some((before, rest)) = entry.split_once('[') else {
        return if most == 0 { Err(many()) } else { Ok(vec![entry.into()]) };
    };
    let (inside, after) = rest.split_once(']').ok_or("it has a [ without a ]")?;
    let ends = match after {
        "" => vec![String::new()],
        after => expand(after, most)?,
    };
    let mut all = Vec::new();
    for range in inside.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| {
            let digits = !text.is_empty() && text.len() <= 18 && text.bytes().all(|b| b.is_ascii_digit());
            digits.then(|| text.parse::<u64>().expect("at most 18 digits"))
        };
        let (begin, end) = number(first).zip(number(last)).ok_or_else(|| format!("`{range}` is no range"))?;
        if begin > end {
            return Err(format!("`{range}` ends before it begins"));
        }
        for n in begin..=end {
            if all.len() + ends.len() > most {
                return Err(many());
            }
            // As many digits as the first number has.
            let width = first.len();
            all.extend(ends.iter().map(|end| format!("{before}{n:0width$}{end}")));
        }
    }
    Ok(all)
}

/// How many tasks the node of this number has, of a list as in `2(x3),1`; `None` if the list does not say.
pub(super) fn tasks_of(list: &str, node: u32) -> Option<u32> {
    let mut left = node;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1u32),
        };
        let tasks = tasks.parse().ok()?;
        match left.checked_sub(nodes) {
            None => return Some(tasks),
            Some(rest) => left = rest,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use pushgate_tests::fuzz::{depth, fuzz, kind};

    use super::*;

    #[test]
    fn hosts_are_listed_one_by_one_and_as_ranges() {
        for (list, expected) in [
            ("node7", "node7"),
            ("node[01-03,7],gpu1", "node01 node02 node03 node7 gpu1"),
            ("a,b", "a b"),
            ("n[9-11]", "n9 n10 n11"),
            ("n[008-010]-ib", "n008-ib n009-ib n010-ib"),
            ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
            ("10.0.0.[4-5]", "10.0.0.4 10.0.0.5"),
        ] {
            assert_eq!(hosts(list).unwrap().join(" "), expected, "{list}");
        }
    }

    #[test]
    fn p8_a_list_that_is_wrong_or_endless_is_refused() {
        for (list, says) in [
            ("", "empty name"),
            ("a,,b", "empty name"),
            ("a[1-2", "[ without a ]"),
            ("a]", "] without a ["),
            ("a[[1]]", "[ within brackets"),
            ("a[]", "no range"),
            ("a[3-1]", "ends before it begins"),
            ("a[1-x]", "no range"),
            ("a b", "blank"),
            ("a[0-99999999999999999999]", "no range"),
            ("a[0-999999999999999]", "more than 65536"),
            ("a[0-999]b[0-999]", "more than 65536"),
            // Names of 64 MiB in all.
            (&format!("{}[1-60000]", "a".repeat(1200)), "more than 128 bytes"),
            // One level of a recursion for each.
            (&"[1]".repeat(100_000), "more than 4 brackets"),
        ] {
            let e = hosts(list).unwrap_err();
            assert!(e.contains(says), "{list}: {e}");
        }
    }

    #[test]
    fn tasks_of_a_node_are_counted_through_repeats() {
        let of = |node| tasks_of("2(x3),1,4(x2)", node);
        assert_eq!([0, 2, 3, 4, 5].map(of), [Some(2), Some(2), Some(1), Some(4), Some(4)]);
        assert_eq!(of(6), None);
        for list in ["", "x", "2(x", "2(x3", "2(xa)"] {
            assert_eq!(tasks_of(list, 0), None, "{list}");
        }
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_list_of_hosts_makes_its_reader_panic_or_fill_memory() {
        let lists = ["node[01-03,7],gpu1", "r[1-2]n[1,3]", "2(x3),1,4(x2)", "n[0008-9999]-ib"];
        let seeds = lists.map(|list| list.as_bytes().to_vec());
        fuzz(&seeds, |bytes| {
            let list = String::from_utf8_lossy(bytes);
            let tasks = tasks_of(&list, bytes.len() as u32).is_some() as u64;
            let hosts = match hosts(&list) {
                Ok(hosts) => {
                    assert!((1..=MOST).contains(&hosts.len()));
                    depth(hosts.len())
                }
                Err(why) => kind(why),
            };
            hosts << 1 | tasks
        });
    }
}
