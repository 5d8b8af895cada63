//! Line plots as SVG: several series, linear or logarithmic axes. They can be read without colour,
//! because every series has its own dashes and markers.

use std::fmt::Write;

/// How an axis is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// Evenly, from 0 or below.
    #[default]
    Linear,
    /// By powers of ten. Only positive values are drawn.
    Log10,
    /// By powers of two, with names like 4 KiB. Only positive values are drawn.
    Bytes,
}

/// One axis.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Axis {
    /// What the axis shows, with the unit.
    pub label: String,
    /// How the axis is divided.
    pub scale: Scale,
}

impl Axis {
    /// Makes an axis.
    pub fn new(label: &str, scale: Scale) -> Self {
        Axis { label: label.into(), scale }
    }
}

/// One line of a plot.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Series {
    /// The line's name in the legend.
    pub name: String,
    /// The line's points. Points that an axis cannot show (not finite; not positive on a
    /// logarithmic axis) are left out.
    pub points: Vec<(f64, f64)>,
    /// Draws only the markers, without a line between them.
    pub only_markers: bool,
    /// Points of the line, if it does not go through `points`: a model's line beside measured
    /// points.
    pub along: Vec<(f64, f64)>,
}

impl Series {
    /// A line through points.
    pub fn new(name: &str, points: Vec<(f64, f64)>) -> Self {
        Series { name: name.into(), points, ..Series::default() }
    }

    /// Points without a line.
    pub fn markers(name: &str, points: Vec<(f64, f64)>) -> Self {
        Series { only_markers: true, ..Series::new(name, points) }
    }

    /// Points with a line of its own beside them; without points, a line without markers.
    pub fn beside(name: &str, points: Vec<(f64, f64)>, along: Vec<(f64, f64)>) -> Self {
        Series { along, ..Series::new(name, points) }
    }

    /// The points through which the line goes.
    fn line(&self) -> &[(f64, f64)] {
        match self.along.is_empty() {
            true => &self.points,
            false => &self.along,
        }
    }
}

/// A plot: [`Plot::svg`] draws it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plot {
    /// The title above the plot.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines, in the order in which they are drawn.
    pub series: Vec<Series>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 36.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 58.0;
const LINE: f64 = 18.0;
/// Okabe and Ito's colours, dark enough on white; colour-blind readers can tell them apart.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#000000", "#009e73", "#cc79a7", "#7a5c00"];
const DASHES: [&str; 6] = ["none", "8 4", "2 3", "10 3 2 3", "5 5", "12 3 2 3 2 3"];

/// A range of values, and the ticks in it.
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<(f64, String)>,
}

impl Range {
    fn of(axis: &Axis, values: impl Iterator<Item = f64>) -> Range {
        let shown = values.filter(|v| can_show(axis.scale, *v));
        let (mut low, mut high) = shown.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            (low, high) = (1.0, 10.0);
        }
        let mut ticks = Vec::new();
        match axis.scale {
            Scale::Linear => {
                low = low.min(0.0);
                let step = round_step((high - low) / 6.0);
                high = (high / step).ceil() * step;
                low = (low / step).floor() * step;
                let count = ((high - low) / step).round() as i64;
                ticks.extend((0..=count).map(|i| low + i as f64 * step).map(|v| (v, number(v))));
            }
            Scale::Log10 => {
                let (a, b) = exponents(low.log10(), high.log10());
                (low, high) = (10f64.powi(a), 10f64.powi(b));
                ticks.extend((a..=b).map(|e| 10f64.powi(e)).map(|v| (v, number(v))));
            }
            Scale::Bytes => {
                let (a, b) = exponents(low.log2(), high.log2());
                (low, high) = (2f64.powi(a), 2f64.powi(b));
                let step = ((b - a) as usize).div_ceil(12).max(1);
                ticks.extend((a..=b).step_by(step).map(|e| 2f64.powi(e)).map(|v| (v, bytes(v))));
            }
        }
        Range { scale: axis.scale, low, high, ticks }
    }

    /// The position of a value in the range: 0 at the low end, 1 at the high end.
    fn part(&self, v: f64) -> f64 {
        match self.scale {
            Scale::Linear => (v - self.low) / (self.high - self.low),
            Scale::Log10 | Scale::Bytes => (v / self.low).ln() / (self.high / self.low).ln(),
        }
    }
}

fn can_show(scale: Scale, v: f64) -> bool {
    v.is_finite() && (scale == Scale::Linear || v > 0.0)
}

/// The whole numbers around both values, at least one apart.
fn exponents(low: f64, high: f64) -> (i32, i32) {
    // A value on a power must not move to the next one by rounding.
    let (a, b) = ((low + 1e-9).floor() as i32, (high - 1e-9).ceil() as i32);
    (a, b.max(a + 1))
}

/// 1, 2 or 5 times a power of ten, not less than `v`.
fn round_step(v: f64) -> f64 {
    let power = 10f64.powf(v.max(1e-12).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= v * 0.999_999).unwrap_or(10.0 * power)
}

/// A number as text, without the residue of rounding.
fn number(v: f64) -> String {
    let s = format!("{v:.6}");
    let s = s.trim_end_matches('0').trim_end_matches('.');
    if s.is_empty() || s == "-0" { "0".into() } else { s.into() }
}

/// Writes a size in the largest unit in which the size is a whole number.
pub fn bytes(v: f64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(e, _)| v >= 2f64.powi(*e) && v % 2f64.powi(*e) == 0.0);
    unit.map_or_else(|| format!("{v} B"), |(e, name)| format!("{} {name}", v / 2f64.powi(e)))
}

fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Draws plots below each other, as one file.
pub fn stack(plots: &[Plot]) -> String {
    let mut inner = String::new();
    let mut height = 0.0;
    for plot in plots {
        let place = format!("<svg y=\"{height}\" width=\"{WIDTH}\" height=\"{}\" ", plot.height());
        inner += &plot.svg().replacen("<svg ", &place, 1);
        height += plot.height();
    }
    format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\">\n{inner}</svg>\n")
}

impl Plot {
    /// The height of the drawing with its legend.
    fn height(&self) -> f64 {
        HEIGHT + self.series.len().div_ceil(2) as f64 * LINE + 8.0
    }

    /// The plot as a file of its own, or as an element of an HTML page. The legend's entries stand
    /// below the plot, two in a row.
    pub fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|s| s.points.iter().chain(&s.along));
        let shown = || points().filter(|p| self.shows(p));
        let x = Range::of(&self.x, shown().map(|p| p.0));
        let y = Range::of(&self.y, shown().map(|p| p.1));
        let (w, h) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        let at = |p: &(f64, f64)| (LEFT + x.part(p.0) * w, TOP + (1.0 - y.part(p.1)) * h);
        let full = self.height();
        let mut s = String::new();
        let mut put = |line: std::fmt::Arguments<'_>| writeln!(s, "{line}").expect("a String takes all");
        put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {full}\" \
             font-family=\"sans-serif\" font-size=\"12\" role=\"img\">"
        ));
        put(format_args!("<title>{}</title>", escape(&self.title)));
        put(format_args!("<rect width=\"{WIDTH}\" height=\"{full}\" fill=\"#fff\"/>"));
        let middle = LEFT + w / 2.0;
        put(format_args!(
            "<text x=\"{middle}\" y=\"24\" text-anchor=\"middle\" font-size=\"15\">{}</text>",
            escape(&self.title)
        ));
        for (v, name) in &x.ticks {
            let (px, base) = (LEFT + x.part(*v) * w, TOP + h);
            put(format_args!("<path d=\"M{px:.1} {TOP}V{base}\" stroke=\"#ddd\"/>"));
            put(format_args!(
                "<text x=\"{px:.1}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
                base + 17.0
            ));
        }
        for (v, name) in &y.ticks {
            let py = TOP + (1.0 - y.part(*v)) * h;
            put(format_args!("<path d=\"M{LEFT} {py:.1}h{w}\" stroke=\"#ddd\"/>"));
            put(format_args!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
                LEFT - 6.0,
                py + 4.0
            ));
        }
        put(format_args!(
            "<rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{w}\" height=\"{h}\" fill=\"none\" stroke=\"#444\"/>"
        ));
        put(format_args!(
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            TOP + h + 38.0,
            escape(&self.x.label)
        ));
        let side = TOP + h / 2.0;
        put(format_args!(
            "<text x=\"18\" y=\"{side}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {side})\">{}</text>",
            escape(&self.y.label)
        ));
        for (i, series) in self.series.iter().enumerate() {
            let (colour, dashes) = (COLOURS[i % COLOURS.len()], DASHES[i % DASHES.len()]);
            let places = |of: &[(f64, f64)]| of.iter().filter(|p| self.shows(p)).map(at).collect::<Vec<_>>();
            if !series.only_markers {
                let line: Vec<String> =
                    places(series.line()).iter().map(|(a, b)| format!("{a:.1},{b:.1}")).collect();
                put(format_args!(
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" \
                     stroke-dasharray=\"{dashes}\"/>",
                    line.join(" ")
                ));
            }
            for place in places(&series.points) {
                put(format_args!("{}", marker(i, place, colour)));
            }
            let (lx, ly) = (LEFT + (i % 2) as f64 * w / 2.0, HEIGHT + (i / 2) as f64 * LINE);
            if !series.only_markers {
                put(format_args!(
                    "<path d=\"M{lx} {ly}h34\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dashes}\"/>"
                ));
            }
            if !series.points.is_empty() {
                put(format_args!("{}", marker(i, (lx + 17.0, ly), colour)));
            }
            put(format_args!("<text x=\"{}\" y=\"{}\">{}</text>", lx + 42.0, ly + 4.0, escape(&series.name)));
        }
        s.push_str("</svg>\n");
        s
    }

    fn shows(&self, p: &(f64, f64)) -> bool {
        can_show(self.x.scale, p.0) && can_show(self.y.scale, p.1)
    }
}

/// Draws a series' marker: disc, square, triangle, ring, diamond or cross.
fn marker(series: usize, (x, y): (f64, f64), colour: &str) -> String {
    let path = |d: String| format!("<path d=\"M{x:.1} {y:.1}{d}z\" fill=\"{colour}\"/>");
    match series % 6 {
        0 => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"),
        1 => path("m-3.5 -3.5h7v7h-7".into()),
        2 => path("m0 -4.5l4.5 8h-9".into()),
        3 => format!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#fff\" stroke=\"{colour}\" stroke-width=\"1.8\"/>"
        ),
        4 => path("m0 -5l5 5l-5 5l-5 -5".into()),
        _ => format!(
            "<path d=\"M{x:.1} {y:.1}m-4 -4l8 8m0 -8l-8 8\" stroke=\"{colour}\" stroke-width=\"1.8\" fill=\"none\"/>"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(scale: Scale, points: Vec<(f64, f64)>) -> Plot {
        let series = vec![Series::new("a < b", points), Series::markers("c", vec![(2.0, 2.0)])];
        Plot { title: "T & U".into(), x: Axis::new("x", Scale::Bytes), y: Axis::new("y", scale), series }
    }

    #[test]
    fn text_is_escaped_and_every_series_looks_different() {
        let svg = plot(Scale::Linear, vec![(1.0, 1.0), (1024.0, 3.0)]).svg();
        assert!(svg.contains("<title>T &amp; U</title>") && svg.contains(">a &lt; b</text>"));
        assert_eq!(svg.matches("<polyline").count(), 1, "markers alone have no line");
        assert_eq!(svg.matches("<circle").count(), 3, "two points and the legend");
        assert!(svg.contains(">1 KiB</text>"));
        assert!(DASHES.iter().collect::<std::collections::HashSet<_>>().len() == DASHES.len());
    }

    #[test]
    fn what_an_axis_cannot_show_is_left_out() {
        let bad = vec![(0.0, 5.0), (4.0, 0.0), (4.0, f64::INFINITY), (f64::NAN, 1.0), (8.0, 7.0)];
        let svg = plot(Scale::Log10, bad).svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let line = svg.lines().find(|l| l.starts_with("<polyline")).unwrap();
        assert_eq!(line.matches(',').count(), 1, "{line}");
        assert!(!plot(Scale::Log10, vec![]).svg().contains("NaN"));
        let empty = Plot { series: vec![], ..plot(Scale::Linear, vec![]) };
        assert!(!empty.svg().contains("NaN"));
    }

    #[test]
    fn a_line_may_go_its_own_way() {
        let along = vec![(1.0, 10.0), (2.0, 20.0), (4.0, 40.0)];
        let both = Series::beside("both", vec![(2.0, 25.0)], along.clone());
        let line = Series::beside("line", vec![], along);
        let svg = Plot { series: vec![both, line], ..plot(Scale::Log10, vec![]) }.svg();
        let lines: Vec<&str> = svg.lines().filter(|l| l.starts_with("<polyline")).collect();
        assert!(lines.len() == 2 && lines.iter().all(|l| l.matches(',').count() == 3), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 2, "one point and its legend");
        assert_eq!(svg.matches("stroke-dasharray=\"8 4\"").count(), 2, "a line and its legend");
        assert!(!svg.contains("fill=\"#d55e00\""), "a line without points has no markers");
    }

    #[test]
    fn stacked_plots_lie_below_each_other() {
        let one = plot(Scale::Linear, vec![(1.0, 1.0), (1024.0, 3.0)]);
        let both = stack(&[one.clone(), one.clone()]);
        assert!(
            both.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 972\">"),
            "{both}"
        );
        assert!(
            both.contains("<svg y=\"0\" width=\"760\" height=\"486\" ") && both.contains("<svg y=\"486\" ")
        );
        assert_eq!((both.matches("<svg ").count(), both.matches("</svg>").count()), (3, 3));
        assert!(one.svg().contains("viewBox=\"0 0 760 486\""));
    }

    #[test]
    fn places_follow_the_scale() {
        let axis = Axis::new("y", Scale::Log10);
        let range = Range::of(&axis, [1.0, 100.0].into_iter());
        assert_eq!(range.part(10.0), 0.5);
        assert_eq!(range.ticks.iter().map(|t| t.1.as_str()).collect::<Vec<_>>(), ["1", "10", "100"]);
        let even = Range::of(&Axis::default(), [0.0, 47.0].into_iter());
        assert_eq!(even.ticks.last().unwrap().1, "50");
    }

    #[test]
    fn sizes_have_names() {
        assert_eq!([8.0, 1024.0, 1536.0, 67_108_864.0].map(bytes), ["8 B", "1 KiB", "1536 B", "64 MiB"]);
    }
}
