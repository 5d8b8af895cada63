//! Draws docs/training.svg, bars of a step of training over each transport, from docs/data/training.json.
//!
//! The data are what `tests/gpu/programs/programs.py --only ddp-gpt --per-host 2 --over local,tcp,socket,none --json FILE` wrote on a
//! host with four GPUs. `cargo run -p pushgate-pcie-model --example training-plot` writes the plot; tests of this example compare
//! the committed plot and docs/applications.md with the data.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use serde::Deserialize;

/// A row of the runner's file: milliseconds of a step by transport.
#[derive(Deserialize)]
struct Row {
    name: String,
    ms: BTreeMap<String, f64>,
}

/// The runner's names of transports, and theirs in the plot with the bar's colour.
const BARS: [(&str, &str, &str); 4] = [
    ("local", "pushgate", "#0072b2"),
    ("tcp", "pushgate, qp = tcp", "#56b4e9"),
    ("socket", "NCCL's sockets, 4 threads x 4", "#d55e00"),
    ("none", "NVLink between all four: one host", "#999999"),
];

fn docs(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "docs", name].iter().collect()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(docs(name)).unwrap_or_else(|e| panic!("docs/{name}: {e}"))
}

/// The committed data: milliseconds of a step by transport.
fn measured() -> BTreeMap<String, f64> {
    let rows: Vec<Row> = serde_json::from_str(&read("data/training.json")).expect("docs/data/training.json");
    rows.into_iter().find(|row| row.name == "ddp-gpt").expect("a row of ddp-gpt").ms
}

/// The plot of the committed data.
fn svg() -> String {
    let ms = measured();
    let longest = BARS.iter().map(|(key, ..)| ms[*key]).fold(0.0, f64::max);
    let mut svg = String::from(concat!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 210" font-family="sans-serif" font-size="14" fill="#222222">"##,
        r##"<rect width="760" height="210" fill="#ffffff"/>"##,
        r##"<text x="10" y="26" font-size="16">Training a GPT of 163 M parameters, two hosts of two GPUs: ms a step</text>"##,
        "\n"
    ));
    for (n, (key, name, colour)) in BARS.iter().enumerate() {
        let (y, ms) = (44 + 40 * n, ms[*key]);
        let width = 400.0 * ms / longest;
        writeln!(svg, r#"<text x="260" y="{}" text-anchor="end">{name}</text>"#, y + 19).expect("a string");
        writeln!(svg, r#"<rect x="270" y="{y}" width="{width:.1}" height="28" fill="{colour}"/>"#)
            .expect("a string");
        writeln!(svg, r#"<text x="{:.1}" y="{}">{ms:.1}</text>"#, 278.0 + width, y + 19).expect("a string");
    }
    svg + "</svg>\n"
}

fn main() {
    let path = docs("training.svg");
    std::fs::write(&path, svg()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    println!("{}", path.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_plot_of_training_is_what_the_data_give() {
        assert!(
            read("training.svg") == svg(),
            "docs/training.svg is not what docs/data/training.json gives; make it anew: cargo run -p pushgate-pcie-model --example \
             training-plot"
        );
    }

    /// The page and the plot must not drift apart.
    #[test]
    fn the_page_on_applications_has_a_row_with_the_figures_of_training() {
        let ms = measured();
        let row: Vec<String> = BARS.iter().map(|(key, ..)| format!("{:.1}", ms[*key])).collect();
        let row = row.join(" | ");
        assert!(read("applications.md").contains(&row), "docs/applications.md has no row with {row}");
    }
}
