//! Draws docs/nccl-allreduce.svg from docs/data/nccl-allreduce.toml.
//!
//! `cargo run -p pushgate-pcie-model --example nccl-plot` writes the file; a test of this example
//! compares the committed file with what the data give.

use std::path::PathBuf;

use pushgate_pcie_model::plot::{Axis, Plot, Scale, Series};
use serde::Deserialize;

/// What was measured. Fields that are not drawn say how, for readers of the file.
#[derive(Deserialize)]
struct Measured {
    title: String,
    bytes: Vec<f64>,
    series: Vec<Line>,
    ceiling: Ceiling,
}

/// Bus bandwidth of one transport, GB/s, one value for each size.
#[derive(Deserialize)]
struct Line {
    name: String,
    busbw: Vec<f64>,
}

/// What no transport can exceed, GB/s.
#[derive(Deserialize)]
struct Ceiling {
    name: String,
    busbw: f64,
}

fn docs(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "docs", name].iter().collect()
}

/// The committed data.
fn measured() -> Measured {
    let path = docs("data/nccl-allreduce.toml");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    toml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The plot of the committed data.
fn svg() -> String {
    let measured = measured();
    let sizes = &measured.bytes;
    let mut series: Vec<Series> = Vec::new();
    for line in measured.series {
        assert_eq!(line.busbw.len(), sizes.len(), "`{}` needs one value for each size", line.name);
        series.push(Series::new(&line.name, sizes.iter().copied().zip(line.busbw).collect()));
    }
    let ends = sizes.first().into_iter().chain(sizes.last());
    let ceiling = ends.map(|bytes| (*bytes, measured.ceiling.busbw)).collect();
    let name = format!("{}: {} GB/s", measured.ceiling.name, measured.ceiling.busbw);
    // Third, so that the line is black and dotted.
    series.insert(2, Series::beside(&name, Vec::new(), ceiling));
    let (x, y) = ("size of the allreduce", "bus bandwidth, GB/s");
    Plot { title: measured.title, x: Axis::new(x, Scale::Bytes), y: Axis::new(y, Scale::Linear), series }
        .svg()
}

fn main() {
    let path = docs("nccl-allreduce.svg");
    std::fs::write(&path, svg()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    println!("{}", path.display());
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_plot_of_nccl_is_what_the_data_give() {
        let committed =
            std::fs::read_to_string(super::docs("nccl-allreduce.svg")).expect("docs/nccl-allreduce.svg");
        assert!(
            committed == super::svg(),
            "docs/nccl-allreduce.svg is not what docs/data/nccl-allreduce.toml gives; make it anew: cargo run -p \
             pushgate-pcie-model --example nccl-plot"
        );
    }

    /// The page and the plot must not drift apart.
    #[test]
    fn the_benchmarks_have_a_row_with_the_figures_of_each_series() {
        let page = std::fs::read_to_string(super::docs("benchmarks.md")).expect("docs/benchmarks.md");
        let rows: Vec<Vec<f64>> = page
            .lines()
            .map(|line| {
                line.split('|').filter_map(|cell| cell.trim().trim_matches('*').parse().ok()).collect()
            })
            .collect();
        for series in super::measured().series {
            let (name, figures) = (series.name, series.busbw);
            assert!(
                rows.contains(&figures),
                "docs/benchmarks.md has no row of a table with {name}: {figures:?}"
            );
        }
    }
}
