//! A caller of NCCL's tables for one-sided operations (RMA, formerly GIN), without kernels: it does what NCCL's proxy does when
//! a kernel has asked for puts, signals and gets. It knows nothing about the plugin but what NCCL's headers say.
//!
//! `table` has the library and its calls, `group` the ranks of a scenario, `rank` what a rank makes and how it waits; the
//! others are scenarios, which `scenario` lists.

mod bytes;
mod closing;
mod contexts;
mod depth;
mod group;
mod growth;
mod late;
mod lost;
mod order;
mod passive;
mod random;
mod rank;
mod scenario;
mod signals;
mod speed;
mod table;
mod wrong;

use scenario::Options;
use table::Version;

/// Runs what `nccl-caller rma` was told to: a scenario's name, then options. Returns what is wrong with the words.
pub fn run(mut words: impl Iterator<Item = String>) -> Result<(), String> {
    let names: Vec<&str> = scenario::ALL.iter().map(|scenario| scenario.name).collect();
    let names = names.join(", ");
    let usage = format!(
        "nccl-caller rma SCENARIO --plugin FILE [--table gin11|gin12|rma13|rma14|rma15|rma16] [--processes] [--gpu] \
         [--ranks N] [--contexts N] [--max BYTES] [--rounds N] [--times N] [--seed N]\nscenarios: {names}"
    );
    let wrong = |what: String| format!("{what}\n{usage}");
    let name = words.next().unwrap_or_default();
    let mut o = Options::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--processes" => o.processes = true,
            "--gpu" => o.gpu = true,
            _ => {
                let value = words.next().ok_or_else(|| wrong(format!("{word} takes a value")))?;
                let number = || {
                    value.parse::<u64>().map_err(|_| wrong(format!("{word} is {value}, expected a number")))
                };
                match word.as_str() {
                    "--plugin" => o.plugin = value.into(),
                    "--table" => {
                        o.table = Version::of(&value)
                            .ok_or_else(|| wrong(format!("{word} is {value}, expected a version")))?;
                    }
                    "--ranks" => o.ranks = number()? as usize,
                    "--contexts" => o.contexts = number()? as usize,
                    "--max" => o.max = number()? as usize,
                    "--rounds" => o.rounds = number()? as usize,
                    "--times" => o.times = number()? as usize,
                    "--seed" => o.seed = number()?,
                    _ => return Err(wrong(format!("{word} is no option"))),
                }
            }
        }
    }
    if scenario::run(&name, &o) { Ok(()) } else { Err(wrong("which scenario?".into())) }
}
