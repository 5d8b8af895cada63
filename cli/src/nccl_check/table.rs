//! What is printed: the table of nccl-tests, with the transport and the ratio behind its columns; CSV, JSON, plots.

use pushgate_pcie_model::plot::{Axis, Plot, Scale, Series};
use serde::Serialize;

use super::collective::Collective;
use super::transport::{Transport, Way};
use super::turns::Turn;
use crate::nccl_tests::{RUN_TITLES, TITLES, case, columns, run_titles, titles};

/// A collective at one size over one transport: the best of all rounds and ways.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub collective: Collective,
    /// Bytes of all ranks' parts together.
    pub size: u64,
    /// Elements that a call is told.
    pub count: u64,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub redop: &'static str,
    pub root: i32,
    #[serde(serialize_with = "name")]
    pub transport: Transport,
    /// The way that was the best, `socket 4x4` say.
    pub way: String,
    /// Mean of the iterations and of the ranks, microseconds.
    pub us: f64,
    /// GB/s, 10^9 bytes a second.
    pub algbw: f64,
    pub busbw: f64,
    /// Wrong elements of all ranks, rounds and ways.
    pub wrong: u64,
    /// The time of the best of NCCL's own transports by the plugin's; none in other rows, or where none of them ran.
    pub ratio: Option<f64>,
    /// The best of NCCL's own transports.
    pub beside: Option<String>,
}

fn name<S: serde::Serializer>(transport: &Transport, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(transport.name())
}

/// Rows of all turns: by collective, size and transport, in the order in which they were asked for.
pub fn rows(
    collectives: &[Collective],
    sizes: &[u64],
    transports: &[Transport],
    ranks: u32,
    turns: &[(Way, Turn)],
) -> Vec<Row> {
    let mut rows = Vec::new();
    for collective in collectives {
        for (index, size) in sizes.iter().enumerate() {
            let first = rows.len();
            for transport in transports {
                rows.extend(row(*collective, (index, *size), *transport, ranks, turns));
            }
            add_ratio(&mut rows[first..]);
        }
    }
    rows
}

fn row(
    collective: Collective,
    (index, size): (usize, u64),
    transport: Transport,
    ranks: u32,
    turns: &[(Way, Turn)],
) -> Option<Row> {
    let mut best: Option<(f64, Way)> = None;
    let mut wrong = 0;
    for (way, turn) in turns.iter().filter(|(way, _)| way.transport == transport) {
        let of = || turn.rows.iter().filter(|row| row.collective == collective && row.size == index);
        wrong += of().map(|row| row.wrong).sum::<u64>();
        // As nccl-tests by default: the mean of the ranks.
        let us = of().map(|row| row.us).sum::<f64>() / of().count().max(1) as f64;
        if of().count() == ranks as usize && best.is_none_or(|(least, _)| us < least) {
            best = Some((us, *way));
        }
    }
    let (us, way) = best?;
    let shape = collective.shape(size, ranks);
    let algbw = shape.bytes as f64 / us / 1e3;
    let (redop, root) = collective.redop_and_root();
    Some(Row {
        collective,
        size: shape.bytes,
        count: shape.count,
        dtype: "float",
        redop,
        root,
        transport,
        way: way.name(),
        us,
        algbw,
        busbw: algbw * collective.bus(ranks),
        wrong,
        ratio: None,
        beside: None,
    })
}

/// Adds the ratio to the plugin's row among those of one collective and size.
fn add_ratio(rows: &mut [Row]) {
    let own = rows.iter().filter(|row| row.transport != Transport::Pushgate);
    let best = own.min_by(|a, b| a.us.total_cmp(&b.us)).map(|row| (row.us, row.way.clone()));
    if let Some((us, way)) = best
        && let Some(ours) = rows.iter_mut().find(|row| row.transport == Transport::Pushgate)
    {
        (ours.ratio, ours.beside) = (Some(us / ours.us), Some(way));
    }
}

/// The table: a block for each collective.
pub fn text(rows: &[Row], collectives: &[Collective]) -> String {
    let mut text = String::new();
    for collective in collectives {
        let mut block = rows.iter().filter(|row| row.collective == *collective).peekable();
        if block.peek().is_none() {
            continue;
        }
        text += &format!("#\n# {}, out of place\n", collective.name());
        let [names, units] = TITLES.map(titles);
        let [run, run_units] = RUN_TITLES.map(run_titles);
        text += &format!("{names}{run}  {:<10}  ratio\n{}\n", "transport", (units + &run_units).trim_end());
        for row in block {
            let ratio = match (row.ratio, &row.beside) {
                (Some(ratio), Some(beside)) => format!("  {ratio:.2} of {beside}"),
                _ => String::new(),
            };
            let figures = columns(Some((row.us, row.algbw, row.busbw, row.wrong)));
            let case = case(row.size, row.count, row.dtype, row.redop, row.root);
            let line = format!("{case}{figures}  {:<10}{ratio}", row.way);
            text += line.trim_end();
            text += "\n";
        }
    }
    text
}

/// A line of names, and a line a row.
pub fn csv(rows: &[Row]) -> String {
    let mut text =
        "collective,size,count,type,redop,root,transport,way,time_us,algbw_gbs,busbw_gbs,wrong,ratio,beside\n"
            .to_owned();
    for r in rows {
        let ratio = r.ratio.map_or(String::new(), |ratio| format!("{ratio:.4}"));
        text += &format!(
            "{},{},{},{},{},{},{},{},{:.3},{:.4},{:.4},{},{ratio},{}\n",
            r.collective.name(),
            r.size,
            r.count,
            r.dtype,
            r.redop,
            r.root,
            r.transport.name(),
            r.way,
            r.us,
            r.algbw,
            r.busbw,
            r.wrong,
            r.beside.as_deref().unwrap_or_default()
        );
    }
    text
}

/// Two plots for each collective, times and bus bandwidths by size, below each other.
pub fn svg(rows: &[Row], collectives: &[Collective], transports: &[Transport], who: &str) -> String {
    let plot = |collective: Collective, what: &str, y: Axis, of: fn(&Row) -> f64| Plot {
        title: format!("{}, {what}: {who}", collective.name()),
        x: Axis::new("size", Scale::Bytes),
        y,
        series: (transports.iter())
            .filter_map(|transport| {
                let is = |row: &&Row| row.collective == collective && row.transport == *transport;
                let points: Vec<_> = rows.iter().filter(is).map(|row| (row.size as f64, of(row))).collect();
                (!points.is_empty()).then(|| Series::new(transport.name(), points))
            })
            .collect(),
    };
    let plots: Vec<Plot> = (collectives.iter())
        .flat_map(|collective| {
            let us = Axis::new("microseconds", Scale::Log10);
            let gbs = Axis::new("bus bandwidth, GB/s", Scale::Linear);
            [
                plot(*collective, "time", us, |row| row.us),
                plot(*collective, "bus bandwidth", gbs, |row| row.busbw),
            ]
        })
        .collect();
    pushgate_pcie_model::plot::stack(&plots)
}

#[cfg(test)]
mod tests {
    use super::super::rank::Timed;
    use super::*;

    const SIZES: [u64; 2] = [8, 1 << 20];
    const BOTH: [Collective; 2] = [Collective::AllReduce, Collective::AllGather];
    const ALL: [Transport; 3] = [Transport::Pushgate, Transport::Shm, Transport::Socket];

    /// A turn in which both ranks take `us` at the small size and ten times as long at the large one.
    fn turn(us: f64, wrong: u64) -> Turn {
        let mut turn = Turn::default();
        for collective in BOTH {
            for size in 0..2 {
                for rank in 0..2 {
                    let us = us * [1.0, 10.0][size] + f64::from(rank);
                    turn.rows.push(Timed { collective, size, us, wrong: wrong * u64::from(rank == 1) });
                }
            }
        }
        turn
    }

    fn way(transport: Transport, index: usize) -> Way {
        transport.ways()[index]
    }

    fn all() -> Vec<Row> {
        let turns = [
            (way(Transport::Pushgate, 0), turn(21.0, 0)),
            (way(Transport::Shm, 0), turn(9.5, 0)),
            (way(Transport::Socket, 0), turn(30.0, 0)),
            (way(Transport::Socket, 1), turn(25.0, 3)),
            (way(Transport::Pushgate, 0), turn(19.5, 0)),
        ];
        rows(&BOTH, &SIZES, &ALL, 2, &turns)
    }

    #[test]
    fn the_best_round_and_way_counts_and_wrong_elements_add_up() {
        let rows = all();
        assert_eq!(rows.len(), 2 * 2 * 3);
        let first: Vec<_> = rows[..3].iter().map(|r| (r.way.as_str(), r.us, r.wrong)).collect();
        assert_eq!(first, [("pushgate", 20.0, 0), ("shm", 10.0, 0), ("socket 4x4", 25.5, 3)]);
        let large = &rows[3];
        assert_eq!((large.size, large.count, large.us), (1 << 20, 1 << 18, 195.5));
        assert!((large.algbw - 1048576.0 / 195.5 / 1e3).abs() < 1e-9 && large.busbw == large.algbw);
        let gathered = &rows[6];
        assert_eq!((gathered.size, gathered.count, gathered.redop, gathered.root), (8, 1, "none", -1));
        assert!((gathered.busbw * 2.0 - gathered.algbw).abs() < 1e-12);
    }

    #[test]
    fn the_ratio_is_that_of_the_plugin_to_the_best_of_the_others() {
        let rows = all();
        assert_eq!((rows[0].ratio, rows[0].beside.as_deref()), (Some(0.5), Some("shm")));
        assert!(rows[1].ratio.is_none() && rows[2].ratio.is_none());
        // Without any other there is none; nor without the plugin.
        let alone = [(way(Transport::Pushgate, 0), turn(1.0, 0))];
        assert_eq!(super::rows(&BOTH, &SIZES, &ALL, 2, &alone)[0].ratio, None);
        let others = [(way(Transport::Shm, 0), turn(1.0, 0))];
        let rows = super::rows(&BOTH, &SIZES, &ALL, 2, &others);
        assert!(rows.len() == 4 && rows.iter().all(|r| r.ratio.is_none()));
    }

    #[test]
    fn a_turn_without_all_ranks_has_no_time() {
        let mut turn = turn(5.0, 1);
        turn.rows.remove(0);
        let rows = rows(&BOTH, &SIZES, &ALL, 2, &[(way(Transport::Shm, 0), turn)]);
        assert_eq!(rows.len(), 3, "{rows:?}");
    }

    #[test]
    fn the_table_has_the_columns_of_nccl_tests_first() {
        let text = text(&all(), &BOTH);
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "# all_reduce, out of place");
        let names = "# size count type redop root time algbw busbw #wrong transport ratio";
        assert_eq!(words(lines[2]), words(names));
        assert_eq!(words(lines[4]), words("8 2 float sum -1 20.00 0.00 0.00 0 pushgate 0.50 of shm"));
        assert_eq!(words(lines[6]), words("8 2 float sum -1 25.50 0.00 0.00 3 socket 4x4"));
        // Each figure ends where its name ends.
        for (name, figure) in [("size", "8  "), ("count", "2  "), ("time", "20.00")] {
            let end = |line: &str, what: &str| line.find(what).unwrap() + what.trim_end().len();
            assert_eq!(end(lines[2], name), end(lines[4], figure), "{name}\n{}\n{}", lines[2], lines[4]);
        }
        assert_eq!(text.matches("\n# all_gather, out of place\n").count(), 1);
        assert!(super::text(&[], &BOTH).is_empty());
    }

    #[test]
    fn csv_and_json_have_every_row() {
        let rows = all();
        let csv = csv(&rows);
        let lines: Vec<Vec<_>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), rows.len() + 1);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{csv}");
        assert_eq!(
            csv.lines().nth(1),
            Some("all_reduce,8,2,float,sum,-1,pushgate,pushgate,20.000,0.0004,0.0004,0,0.5000,shm")
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!((&json[0]["transport"], &json[0]["type"]), (&"pushgate".into(), &"float".into()));
        assert_eq!((&json[2]["way"], &json[2]["ratio"]), (&"socket 4x4".into(), &serde_json::Value::Null));
    }

    #[test]
    fn the_plots_have_a_line_for_each_transport_that_ran() {
        let svg = svg(&all(), &BOTH, &ALL, "two <GPUs>");
        // Four plots with three lines each.
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<title>").count()), (12, 4));
        assert!(svg.contains("all_gather, bus bandwidth: two &lt;GPUs&gt;"));
        let read = roxmltree::Document::parse(&svg).unwrap();
        assert_eq!(read.root_element().tag_name().name(), "svg");
    }
}
