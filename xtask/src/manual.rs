//! Manual pages of section 3, one for each call of the C API, made from the comments of its header.

use anyhow::{Context, Result, ensure};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A call of the header: its comment, a paragraph or `@param` in each entry, and its declaration in one line.
struct Call {
    name: String,
    comment: Vec<String>,
    declaration: String,
}

/// The pages' names with their texts in roff.
pub fn pages(header: &str) -> Result<Vec<(String, String)>> {
    let calls = calls(header)?;
    ensure!(!calls.is_empty(), "the header has no calls");
    Ok(calls.iter().map(|call| (format!("{}.3", call.name), page(call, &calls))).collect())
}

/// The header's calls, as cbindgen writes them: a comment of its own before each.
fn calls(header: &str) -> Result<Vec<Call>> {
    let (_, functions) = header.split_once("extern \"C\" {").context("the header has no extern \"C\"")?;
    let mut found = Vec::new();
    for part in functions.split("/**").skip(1) {
        let (comment, code) = part.split_once("*/").context("a comment does not end")?;
        let (declaration, _) = code.split_once(';').context("a comment stands before no declaration")?;
        let declaration = declaration.split_whitespace().collect::<Vec<_>>().join(" ");
        let (before, _) = declaration.split_once('(').context("no call")?;
        let name = before.rsplit([' ', '*']).next().context("a call has a name")?.to_string();
        found.push(Call { name, comment: paragraphs(comment), declaration });
    }
    Ok(found)
}

/// The paragraphs of a comment, without the asterisks at the beginning of lines.
fn paragraphs(comment: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    for line in comment.lines() {
        let line = line.trim().trim_start_matches('*').trim();
        if line.is_empty() || line.starts_with("@param") {
            all.push(String::new());
        }
        let last = all.last_mut().expect("there is one");
        if !line.is_empty() {
            let gap = if last.is_empty() { "" } else { " " };
            *last += &format!("{gap}{line}");
        }
    }
    all.retain(|paragraph| !paragraph.is_empty());
    all
}

fn page(call: &Call, all: &[Call]) -> String {
    let name = &call.name;
    let first = call.comment.first().map_or("", String::as_str);
    let short = first.split(". ").next().unwrap_or(first).trim_end_matches('.');
    let mut text =
        format!(".TH {} 3 \"\" \"pushgate {VERSION}\" \"C API of pushgate\"\n", name.to_uppercase());
    let mut add = |lines: &str| {
        text += lines;
        text.push('\n');
    };
    add(".SH NAME");
    add(&format!("{name} \\- {}", escaped(short)));
    add(".SH SYNOPSIS\n.B #include <pushgate/pushgate.h>\n.PP");
    add(&format!(".B \"{};\"\n.PP\nLink with \\fI\\-lpushgate\\fP.", escaped(&call.declaration)));
    add(".SH DESCRIPTION");
    for paragraph in &call.comment {
        match paragraph.strip_prefix("@param ").and_then(|rest| rest.split_once(' ')) {
            Some((parameter, about)) => {
                add(&format!(".TP\n.I {}\n{}", escaped(parameter), escaped(about.trim())));
            }
            None => add(&format!(".PP\n{}", escaped(paragraph))),
        }
    }
    add(".SH RETURN VALUE");
    add(match call.declaration.starts_with("int ") {
        true => {
            "\\fBPUSHGATE_E_OK\\fP (0), or another \\fBPUSHGATE_E_\\fP number of the header; then\n.BR pushgate_last_message (3)\n\
             says in a sentence what was wrong and what to do."
        }
        false => "As described above; the call can not fail.",
    });
    add(".SH ATTRIBUTES\nAny thread may call this function.");
    add(".SH SEE ALSO");
    let group = |name: &str| name.rsplit_once('_').map(|(group, _)| group.to_string());
    let others = all.iter().map(|other| &other.name).filter(|other| *other != name);
    let near: Vec<_> = others.filter(|other| group(other) == group(name)).collect();
    for other in near {
        add(&format!(".BR {other} (3),"));
    }
    add(".BR pushgate_strerror (3),\n.BR pushgate (1)");
    text
}

/// Text in roff: no backslash, and no line that begins a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('"', "\\(dq");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r#"/**
 * A number.
 */
#define PUSHGATE_E_OK 0
extern "C" {
/**
 * Makes a thing. It may
 * wait.
 *
 * @param size   Bytes,
 *               1 or more.
 * @param thing  The result.
 */
int pushgate_thing_create(size_t size,
                          struct pushgate_thing **thing);

/**
 * Its name.
 */
const char *pushgate_thing_name(const struct pushgate_thing *thing);
}
"#;

    #[test]
    fn each_call_has_a_page_with_its_comment_and_declaration() {
        let pages = pages(HEADER).unwrap();
        let names: Vec<_> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["pushgate_thing_create.3", "pushgate_thing_name.3"]);
        let text = &pages[0].1;
        for part in [
            "pushgate_thing_create \\- Makes a thing\n",
            "int pushgate_thing_create(size_t size, struct pushgate_thing **thing);",
            ".PP\nMakes a thing. It may wait.\n.TP\n.I size\nBytes, 1 or more.\n.TP\n.I thing\nThe result.\n",
            ".BR pushgate_thing_name (3),",
            "PUSHGATE_E_OK",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(pages[1].1.contains("can not fail"), "{}", pages[1].1);
    }

    #[test]
    fn the_header_has_pages_and_a_header_without_calls_is_refused() {
        let header = include_str!("../../c-api/include/pushgate/pushgate.h");
        let pages = pages(header).unwrap();
        assert_eq!(
            pages.len(),
            header.matches("\n */\nint pushgate_").count()
                + header.matches("\n */\nconst char *").count()
                + 1
        );
        super::pages("extern \"C\" {\n}").unwrap_err();
    }
}
