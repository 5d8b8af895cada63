//! What is printed of a run: the table of nccl-tests, a JSON object a size, or CSV.
//!
//! Scripts that read nccl-tests count columns, so the table has its columns: the root too, which an allreduce has
//! not (-1). What the table has no column for stands in the last line and in JSON.

use super::Form;
use super::rank::{Line, Speed};
use crate::nccl_tests::{RUN_TITLES, TITLES, case, columns, run_titles, titles};

const CSV: &str = "size,count,type,redop,out_of_place_us,out_of_place_algbw,out_of_place_busbw,out_of_place_wrong,\
                   in_place_us,in_place_algbw,in_place_busbw,in_place_wrong,ranks,iters,verified,dropped,rnr,credit_stalls\n";

/// One kind of run: microseconds, algbw, busbw, wrong elements.
type Run = Option<(f64, f64, f64, u64)>;

/// The runs out of place and in place.
fn runs(l: &Line) -> [Run; 2] {
    let Speed { time_us, algbw_gbs, busbw_gbs, .. } = l.first;
    let inside = l.in_place_wrong.unwrap_or(0);
    let out = (!l.in_place).then(|| (time_us, algbw_gbs, busbw_gbs, l.wrong - inside));
    let in_place = match (l.in_place_time_us, l.in_place_algbw_gbs, l.in_place_busbw_gbs) {
        (Some(us), Some(algbw), Some(busbw)) => Some((us, algbw, busbw, inside)),
        _ => None,
    };
    [out, in_place]
}

/// The lines above the sizes. `why`: which executor runs, and why.
pub fn header(form: Form, why: &str) -> String {
    match form {
        Form::Json => String::new(),
        Form::Csv => CSV.into(),
        Form::Table => {
            let none = titles([""; 5]);
            let (names, units) = (titles(TITLES[0]), titles(TITLES[1]));
            let [run, run_units] = RUN_TITLES.map(run_titles);
            format!(
                "# {why}\n#\n{none}{:^33}{:^33}\n{names}{run}{run}\n{units}{run_units}{run_units}\n",
                "out-of-place", "in-place"
            )
        }
    }
}

/// The line of one size.
pub fn line(form: Form, l: &Line) -> String {
    let [out, in_place] = runs(l);
    match form {
        Form::Json => serde_json::to_string(l).expect("a line is plain data") + "\n",
        Form::Table => {
            case(l.bytes, l.count, &l.dtype, &l.op, -1) + &columns(out) + &columns(in_place) + "\n"
        }
        Form::Csv => {
            let run = |run: Run| match run {
                Some((us, algbw, busbw, wrong)) => format!("{us:.3},{algbw:.4},{busbw:.4},{wrong}"),
                None => ",,,".into(),
            };
            let rnr = l.rnr.map_or(String::new(), |n| n.to_string());
            format!(
                "{},{},{},{},{},{},{},{},{},{},{rnr},{}\n",
                l.bytes,
                l.count,
                l.dtype,
                l.op,
                run(out),
                run(in_place),
                l.ranks,
                l.iters,
                l.verified,
                l.dropped,
                l.credit_stalls
            )
        }
    }
}

/// The lines below the sizes of a run that has succeeded.
pub fn footer(form: Form, lines: &[Line]) -> String {
    if form != Form::Table {
        return String::new();
    }
    let lines = || lines.iter();
    let wrong: u64 = lines().map(|l| l.wrong).sum();
    let rates: Vec<f64> = lines().flat_map(runs).flatten().map(|(_, _, busbw, _)| busbw).collect();
    let sum = |of: fn(&Line) -> u64| lines().map(of).sum::<u64>();
    let counted = |n: u64| if n == 0 { "nothing".into() } else { n.to_string() };
    let rnr = match lines().map(|l| l.rnr).sum::<Option<u64>>() {
        Some(0) => "no RNR".into(),
        Some(n) => format!("{n} RNR"),
        None => "RNR not counted".into(),
    };
    format!(
        "# {:<20} : {wrong} {}\n# {:<20} : {:.4}\n# {}, {} dropped, {rnr}, waits for credit: {}\n",
        "Out of bounds values",
        if wrong == 0 { "OK" } else { "FAILED" },
        "Avg bus bandwidth",
        rates.iter().sum::<f64>() / rates.len().max(1) as f64,
        if lines().all(|l| l.verified) { "verified" } else { "not verified" },
        counted(sum(|l| l.dropped)),
        sum(|l| l.credit_stalls)
    )
}
