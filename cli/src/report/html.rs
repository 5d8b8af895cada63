//! A page of HTML that is XML as well. Every text that comes in is cleaned, shortened, redacted and escaped
//! here, so nobody else has to think of it.

use std::fmt::Write as _;

use pushgate_pcie_model::plot::Plot;

use super::redact::Redact;

/// Characters of a text at most; of a drawing.
const LONGEST: usize = 600;
const LONGEST_DRAWING: usize = 40_000;
/// Rows of a table at most.
const MOST_ROWS: usize = 256;
/// Columns.
const MOST_COLUMNS: usize = 24;
/// Points of a line of a plot.
const MOST_POINTS: usize = 64;
/// Bytes of the page from which on tables, drawings and plots are left out. With the longest of each the page stays
/// below 1 MiB.
const FULL: usize = 600 << 10;

/// A cell of a table.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    class: &'static str,
    heat: Option<f64>,
}

impl Cell {
    pub fn number(text: String) -> Self {
        Self { text, class: "n", heat: None }
    }

    /// Shaded: 0 white, 1 darkest.
    pub fn shaded(text: String, heat: f64) -> Self {
        Self { text, class: "n", heat: Some(heat.clamp(0.0, 1.0)) }
    }

    pub fn marked(text: &str, class: &'static str) -> Self {
        Self { text: text.into(), class, heat: None }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self { text: text.into(), ..Self::default() }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, ..Self::default() }
    }
}

/// The body of a page, written from its top to its end.
pub struct Body {
    out: String,
    redact: Redact,
}

/// Redacting looks at no more characters than this times those that are shown: what it takes out is shorter after it.
const AHEAD: usize = 8;

/// Without what steers terminals, turns text around or is no character of XML.
fn clean(text: &str, longest: usize) -> String {
    let bad = |c: char| {
        (c.is_control() && c != '\n')
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            || matches!(c, '\u{fffe}' | '\u{ffff}')
    };
    let mut chars = text.chars().map(|c| if bad(c) { '\u{fffd}' } else { c });
    let mut kept: String = chars.by_ref().take(longest).collect();
    if chars.next().is_some() {
        kept += "... (cut)";
    }
    kept
}

/// Escapes text for an element or a quoted attribute.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

impl Body {
    pub fn new(redact: Redact) -> Self {
        Self { out: String::new(), redact }
    }

    /// What stands on the page for a text, before it is escaped.
    pub fn plain(&self, text: &str) -> String {
        self.cut(text, LONGEST)
    }

    fn cut(&self, text: &str, longest: usize) -> String {
        let end = text.char_indices().nth(AHEAD * longest).map_or(text.len(), |(at, _)| at);
        clean(&self.redact.of(&text[..end]), longest)
    }

    fn text(&self, text: &str) -> String {
        escape(&self.plain(text))
    }

    /// Text whose parts between backticks are shown as code.
    fn prose(&self, text: &str) -> String {
        let text = self.text(text);
        let parts: Vec<&str> = text.split('`').collect();
        // An odd backtick is no pair: all of it stays as it is.
        if parts.len().is_multiple_of(2) {
            return text;
        }
        let mark = |(i, part): (usize, &&str)| match i % 2 {
            1 => format!("<code>{part}</code>"),
            _ => (*part).to_owned(),
        };
        parts.iter().enumerate().map(mark).collect()
    }

    /// Writes markup of our own.
    pub fn raw(&mut self, markup: &str) {
        self.out += markup;
        self.out.push('\n');
    }

    fn put(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.out, "{line}").expect("a String takes all");
    }

    /// Whether there is no room for more than a sentence.
    fn is_full(&self) -> bool {
        self.out.len() > FULL
    }

    /// Whether there is no room for `what`; if so, the page says that `what` was left out.
    fn no_room(&mut self, what: &str) -> bool {
        if self.is_full() {
            self.missing(&format!("{what}: left out, for the page would be too large to be sent"));
        }
        self.is_full()
    }

    pub fn section(&mut self, id: &str, title: &str) {
        let title = self.text(title);
        self.put(format_args!("<section id=\"{id}\">\n<h2>{title}</h2>"));
    }

    pub fn end_section(&mut self) {
        self.raw("</section>");
    }

    pub fn heading(&mut self, title: &str) {
        let title = self.text(title);
        self.put(format_args!("<h3>{title}</h3>"));
    }

    pub fn para(&mut self, text: &str) {
        let text = self.prose(text);
        self.put(format_args!("<p>{text}</p>"));
    }

    /// Writes what is not there, why, and what to do.
    pub fn missing(&mut self, text: &str) {
        let text = self.prose(text);
        self.put(format_args!("<p class=\"missing\"><strong>Not here:</strong> {text}</p>"));
    }

    /// Writes what a reader must know of what follows.
    pub fn beware(&mut self, text: &str) {
        let text = self.prose(text);
        self.put(format_args!("<p class=\"missing\"><strong>Beware:</strong> {text}</p>"));
    }

    /// Writes a list; nothing if the list is empty.
    pub fn list(&mut self, items: &[String]) {
        if items.is_empty() || self.no_room("a list") {
            return;
        }
        self.raw("<ul>");
        let mut shown = 0;
        while shown < items.len().min(MOST_ROWS) && !self.is_full() {
            let item = self.prose(&items[shown]);
            self.put(format_args!("<li>{item}</li>"));
            shown += 1;
        }
        if shown < items.len() {
            self.put(format_args!("<li>and {} more</li>", items.len() - shown));
        }
        self.raw("</ul>");
    }

    /// Writes a drawing made of characters.
    pub fn drawing(&mut self, label: &str, text: &str) {
        if self.no_room(label) {
            return;
        }
        let label = self.text(label);
        let text = escape(&self.cut(text, LONGEST_DRAWING));
        // A first line break in <pre> is none in HTML, and is one in XML.
        let text = text.trim_matches('\n');
        self.put(format_args!(
            "<div class=\"scroll\" role=\"region\" aria-label=\"{label}\" tabindex=\"0\"><pre>{text}</pre></div>"
        ));
    }

    /// Writes a table. The first cell of a row is its heading.
    pub fn table(&mut self, caption: &str, head: &[&str], rows: &[Vec<Cell>]) {
        if self.no_room(caption) {
            return;
        }
        let caption = self.text(caption);
        self.put(format_args!(
            "<div class=\"scroll\" role=\"region\" aria-label=\"{caption}\" tabindex=\"0\"><table>\n\
             <caption>{caption}</caption>\n<thead><tr>"
        ));
        for title in head.iter().take(MOST_COLUMNS) {
            let title = self.text(title);
            self.put(format_args!("<th scope=\"col\">{title}</th>"));
        }
        self.raw("</tr></thead>\n<tbody>");
        let mut shown = 0;
        for row in rows.iter().take(MOST_ROWS) {
            if self.is_full() {
                break;
            }
            shown += 1;
            let mut line = String::from("<tr>");
            for (i, cell) in row.iter().take(MOST_COLUMNS).enumerate() {
                let (tag, scope) = if i == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
                // Long text wants room, a short name its own line.
                let class = match (cell.class, cell.text.chars().count()) {
                    ("", n) if n <= if i == 0 { 28 } else { 20 } => " class=\"name\"".to_owned(),
                    ("", n) if n > 40 => " class=\"long\"".to_owned(),
                    ("", _) => String::new(),
                    (class, _) => format!(" class=\"{class}\""),
                };
                let style =
                    cell.heat.map_or(String::new(), |h| format!(" style=\"background:{}\"", shade(h)));
                let _ = write!(line, "<{tag}{scope}{class}{style}>{}</{tag}>", self.prose(&cell.text));
            }
            line += &"<td></td>".repeat(head.len().min(MOST_COLUMNS).saturating_sub(row.len()));
            self.put(format_args!("{line}</tr>"));
        }
        self.raw("</tbody></table></div>");
        if shown < rows.len() || head.len() > MOST_COLUMNS {
            self.put(format_args!(
                "<p>Shown are {} of {} rows, {} of {} columns.</p>",
                shown,
                rows.len(),
                head.len().min(MOST_COLUMNS),
                head.len()
            ));
        }
    }

    /// Writes a plot with a sentence below it.
    pub fn plot(&mut self, mut plot: Plot, caption: &str) {
        if self.no_room(&plot.title) {
            return;
        }
        plot.title = self.plain(&plot.title);
        for series in &mut plot.series {
            series.name = self.plain(&series.name);
            series.points.truncate(MOST_POINTS);
            series.along.truncate(MOST_POINTS);
        }
        let caption = self.text(caption);
        self.put(format_args!(
            "<figure><div class=\"scroll\">{}</div><figcaption>{caption}</figcaption></figure>",
            plot.svg()
        ));
    }

    /// The whole page around it.
    pub fn page(self, title: &str) -> String {
        let title = self.text(title);
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
            self.out
        )
    }
}

/// White to a blue that black text can still be read on; as grey it grows darker as steadily.
fn shade(heat: f64) -> String {
    let mix = |from: f64, to: f64| (from + (to - from) * heat).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(255.0, 116.0), mix(255.0, 169.0), mix(255.0, 214.0))
}

const STYLE: &str = "\
body{font:1rem/1.45 system-ui,sans-serif;color:#111;background:#fff;max-width:64rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.25rem;border-bottom:2px solid #111;margin:2rem 0 .6rem}
h3{font-size:1.05rem;margin:1.4rem 0 .4rem}p,li{max-width:46rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.6rem 0}
pre{font:.8rem/1.25 ui-monospace,'DejaVu Sans Mono',monospace;margin:0}
table{border-collapse:collapse;font-size:.88rem;min-width:18rem}caption{text-align:left;font-weight:600;padding:.3rem 0}
th,td{border:1px solid #999;padding:.2rem .5rem;text-align:left;vertical-align:top}
thead th{background:#eee}tbody th{font-weight:600}.name{white-space:nowrap}.long{min-width:11rem}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.failed{font-weight:700;border:3px double #111}.warned{font-weight:700}.quiet{color:#444}
.missing{border:2px dashed #111;padding:.5rem .7rem}
figure{margin:1rem 0}figcaption{font-size:.88rem;max-width:46rem}
svg{display:block;width:100%;min-width:34rem;max-width:48rem;height:auto}
nav a{color:#003e8a}footer{margin-top:2rem;border-top:1px solid #999;font-size:.88rem}
@media print{body{max-width:none;padding:0;font-size:9pt}nav{display:none}svg{min-width:0;max-width:15cm}
table{font-size:6.5pt}th,td{padding:1px 3px}.long{min-width:0}
.scroll{overflow:visible}pre{white-space:pre-wrap}figure,tr{break-inside:avoid}
}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_is_only_text() {
        let mut body = Body::new(Redact::default());
        let hostile = "<script>alert(1)</script> ]]> \" ' & \u{0}\u{1b}[31m\u{202e}\u{ffff}";
        body.para(hostile);
        body.drawing(hostile, &format!("\n{hostile}\n"));
        body.table(hostile, &[hostile], &[vec![hostile.into()]]);
        body.list(&[hostile.into()]);
        let page = body.page(hostile);
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;"), "{page}");
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let parsed = roxmltree::Document::parse_with_options(&page, options).unwrap();
        let shown = "<script>alert(1)</script> ]]> \" ' & \u{fffd}\u{fffd}[31m\u{fffd}\u{fffd}";
        let texts: Vec<&str> =
            parsed.descendants().filter_map(|n| n.text()).filter(|t| *t == shown).collect();
        assert!(texts.len() >= 6, "{texts:?}");
    }

    #[test]
    fn nothing_grows_without_end() {
        let mut body = Body::new(Redact::default());
        let long = "x".repeat(1 << 16);
        body.para(&long);
        body.drawing("d", &long);
        let row = vec![Cell::from("1"); 1000];
        body.table("t", &["h"; 1000], &vec![row; 10_000]);
        body.list(&vec!["i".to_owned(); 10_000]);
        assert!(body.out.contains("256 of 10000 rows") && body.out.contains("and 9744 more"));
        // And the worst there is: every character grows by being escaped, and nobody stops.
        let worst = "'".repeat(1 << 12);
        for _ in 0..8 {
            body.drawing("a drawing", &worst);
            body.table(&worst, &[&*worst; 100], &vec![vec![Cell::from(&*worst); 100]; 300]);
            body.list(&vec![worst.clone(); 300]);
        }
        let page = body.page(&worst);
        assert!(page.len() < 1 << 20, "{}", page.len());
        assert!(page.contains("a drawing: left out"), "no word of what is left out");
    }

    #[test]
    fn darker_is_more() {
        assert_eq!(shade(0.0), "#ffffff");
        let grey = |h| {
            let s = shade(h);
            let part = |i| f64::from(u8::from_str_radix(&s[i..i + 2], 16).unwrap());
            0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5)
        };
        assert!(grey(0.0) > grey(0.3) && grey(0.3) > grey(0.7) && grey(0.7) > grey(1.0) && grey(1.0) > 128.0);
    }
}
