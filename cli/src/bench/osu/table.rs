//! The table: header and columns as widely known scripts expect them.

use pushgate::Comm;
use pushgate::settings::Transport;
use serde_json::json;

use super::{Kind, Options};

/// Width of the first column, and of each other one.
const SIZE: usize = 10;
const FIELD: usize = 18;

/// The result of one size.
pub struct Line {
    pub bytes: u64,
    /// Time of the measured iterations, nanoseconds.
    pub ns: u64,
    /// None: nothing was checked.
    pub valid: Option<bool>,
}

impl Line {
    /// Microseconds one way, or MB/s (10^6 bytes) of all that was sent.
    fn value(&self, o: &Options) -> f64 {
        let iterations = o.counts(self.bytes)[0] as f64;
        let ns = self.ns.max(1) as f64;
        let sent = self.bytes as f64 * o.messages as f64 * iterations;
        match o.kind {
            Kind::Latency => ns / 1e3 / iterations / 2.0,
            Kind::Bandwidth => sent * 1e3 / ns,
            Kind::Bidirectional => 2.0 * sent * 1e3 / ns,
        }
    }
}

/// Test and column by their original names.
fn names(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Latency => ("Latency Test", "Avg Latency(us)"),
        Kind::Bandwidth => ("Bandwidth Test", "Bandwidth (MB/s)"),
        Kind::Bidirectional => ("Bi-Directional Bandwidth Test", "Bandwidth (MB/s)"),
    }
}

pub fn header(o: &Options, comm: &Comm, processes: u32) -> String {
    let (test, column) = names(o.kind);
    let s = &o.settings;
    let validation = if o.validate { format!("{:>FIELD$}", "Validation") } else { String::new() };
    format!(
        "# pushgate {}, in the form of OSU MPI {test} v7.5\n\
         # qp {}, window {} of {} KiB, {}, {} in {}, buffers {}\n\
         # Datatype: bytes.\n\
         {:<SIZE$}{column:>FIELD$}{validation}",
        o.kind.name(),
        Transport::names(&comm.transports()),
        s.window,
        s.window_size >> 10,
        comm.context().describe(),
        if o.membership.is_some() { "one rank" } else { "both ranks" },
        match processes {
            1 => "this process".into(),
            n => format!("{n} processes of this host"),
        },
        o.buffers(),
        "# Size",
    )
}

pub fn line(o: &Options, comm: &Comm, line: &Line) -> String {
    let value = line.value(o);
    if o.json {
        let [iterations, warmup] = o.counts(line.bytes);
        return json!({
            "bench": o.kind.name(), "bytes": line.bytes, "value": value,
            "unit": if o.kind == Kind::Latency { "us" } else { "MB/s" },
            "valid": line.valid, "iterations": iterations, "warmup": warmup, "messages": o.messages,
            "buffers": o.buffers(), "qp": Transport::names(&comm.transports()), "window": o.settings.window.to_string(),
            "window_size": o.settings.window_size, "device": comm.context().device(),
        })
        .to_string();
    }
    let validation = match line.valid {
        None => String::new(),
        Some(valid) => format!("{:>FIELD$}", if valid { "Pass" } else { "Fail" }),
    };
    format!("{:<SIZE$}{value:>FIELD$.2}{validation}", line.bytes)
}
