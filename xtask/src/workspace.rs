//! The packages of the workspace, as cargo describes them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;

/// A package of the workspace.
pub struct Package {
    /// The package's name.
    pub name: String,
    /// What the package is, in one line.
    pub description: String,
    /// The package's folder, from the repository root.
    pub folder: PathBuf,
    targets: Vec<Target>,
}

struct Target {
    name: String,
    is_library: bool,
    is_program: bool,
    /// rustdoc writes pages for the target, unless its manifest says otherwise.
    has_pages: bool,
    /// The target's main file, from the repository root.
    file: PathBuf,
}

impl Package {
    /// The folder that rustdoc writes for the package's library, else for the package's program, if it writes one.
    pub fn rustdoc_folder(&self) -> Option<String> {
        let pages = || self.targets.iter().filter(|target| target.has_pages);
        let target =
            pages().find(|target| target.is_library).or_else(|| pages().find(|target| target.is_program))?;
        Some(target.name.replace('-', "_"))
    }
}

/// All packages, by name, the package of the root first.
pub fn packages(paths: &Paths) -> Result<Vec<Package>> {
    let mut command = process::cargo(&paths.root);
    command.args(["metadata", "--no-deps", "--format-version=1", "--offline"]);
    parse(&process::capture(command, false, Guard::NONE)?, &paths.root)
}

fn parse(metadata: &str, root: &Path) -> Result<Vec<Package>> {
    let metadata: serde_json::Value =
        serde_json::from_str(metadata).context("the output of cargo metadata is no JSON")?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
    let file = |value: &serde_json::Value| {
        let path = PathBuf::from(text(value));
        path.strip_prefix(root).map(Path::to_path_buf).unwrap_or(path)
    };
    let target = |target: &serde_json::Value| {
        let kinds: Vec<_> = target["kind"].as_array().into_iter().flatten().map(text).collect();
        Target {
            name: text(&target["name"]),
            is_library: kinds.iter().any(|kind| kind.ends_with("lib") || kind == "proc-macro"),
            is_program: kinds.iter().any(|kind| kind == "bin"),
            has_pages: target["doc"] != false,
            file: file(&target["src_path"]),
        }
    };
    let package = |package: &serde_json::Value| Package {
        name: text(&package["name"]),
        description: text(&package["description"]),
        folder: file(&package["manifest_path"]).parent().unwrap_or(Path::new("")).to_path_buf(),
        targets: package["targets"].as_array().into_iter().flatten().map(target).collect(),
    };
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let mut packages: Vec<_> = packages.iter().map(package).collect();
    packages.sort_by_key(|package| (!package.folder.as_os_str().is_empty(), package.name.clone()));
    Ok(packages)
}

/// The package that a file belongs to: the package that has a target of this file, else the package with the
/// nearest folder above.
pub fn owner<'a>(packages: &'a [Package], file: &Path) -> Option<&'a Package> {
    let has_target = |package: &&Package| package.targets.iter().any(|target| target.file == file);
    let above = packages.iter().filter(|package| file.starts_with(&package.folder));
    packages
        .iter()
        .find(has_target)
        .or_else(|| above.max_by_key(|package| package.folder.components().count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{"packages": [
        {"name": "suites", "description": null, "manifest_path": "/r/tests/Cargo.toml", "targets": [
            {"name": "suite-bin", "kind": ["bin"], "src_path": "/r/tests/src/main.rs"},
            {"name": "one", "kind": ["test"], "src_path": "/r/tests/tests/one.rs"}]},
        {"name": "whole", "description": "All of it", "manifest_path": "/r/Cargo.toml", "targets": [
            {"name": "whole", "kind": ["bin"], "src_path": "/r/src/bin/whole.rs"},
            {"name": "whole-lib", "kind": ["cdylib", "rlib"], "src_path": "/r/src/lib.rs"},
            {"name": "comm", "kind": ["test"], "src_path": "/r/tests/comm.rs"}]}]}"#;

    #[test]
    fn a_file_belongs_to_its_target_before_the_nearest_folder() {
        let packages = parse(METADATA, Path::new("/r")).unwrap();
        let owner = |file| owner(&packages, Path::new(file)).unwrap().name.as_str();
        assert_eq!(owner("tests/comm.rs"), "whole");
        assert_eq!(owner("tests/tests/one.rs"), "suites");
        assert_eq!(owner("tests/src/helper.rs"), "suites");
        assert_eq!(owner("src/bin/whole/part.rs"), "whole");
    }

    #[test]
    fn the_package_of_the_root_comes_first_and_rustdoc_prefers_the_library() {
        let packages = parse(METADATA, Path::new("/r")).unwrap();
        let found: Vec<_> = packages.iter().map(|p| (p.name.as_str(), p.rustdoc_folder().unwrap())).collect();
        assert_eq!(found, [("whole", "whole_lib".into()), ("suites", "suite_bin".into())]);
        let without = METADATA.replace(r#""kind": ["bin"],"#, r#""kind": ["bin"], "doc": false,"#);
        let found = parse(&without, Path::new("/r")).unwrap();
        assert_eq!(found[1].rustdoc_folder(), None, "its only program has no pages");
    }
}
