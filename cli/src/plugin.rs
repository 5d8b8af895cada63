//! Where the libraries lie that NCCL and NIXL load.

use std::path::{Path, PathBuf};

/// A library that another program loads.
pub struct Plugin {
    /// The library's name.
    pub file: &'static str,
    /// Where packages put it, below their folder of libraries.
    pub below: [&'static str; 2],
    /// How it is built.
    pub build: &'static str,
}

impl Plugin {
    /// The file that was named; else beside `program`, as `cargo` puts both, or in `lib` beside its folder, as packages do.
    pub fn find(&self, named: Option<&Path>, program: Option<&Path>) -> Result<PathBuf, String> {
        let Plugin { file, below, build } = self;
        if let Some(path) = named {
            return match std::path::absolute(path) {
                Ok(path) if path.is_file() => Ok(path),
                _ => Err(format!("the plugin (no file {}): build it with {build}", path.display())),
            };
        }
        let folder = program.and_then(Path::parent);
        let mut places: Vec<PathBuf> = folder.map(|folder| folder.join(file)).into_iter().collect();
        if let Some(prefix) = folder.and_then(Path::parent) {
            let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
            for library in ["lib", "lib64", &multiarch] {
                places.extend(below.iter().map(|below| prefix.join(library).join(below).join(file)));
            }
        }
        let found = places.iter().find(|path| path.is_file()).cloned();
        found.ok_or_else(|| {
            let beside = folder.map_or_else(|| "this program".into(), |folder| folder.display().to_string());
            format!(
                "the plugin (no {file} in {beside}): build it with {build}, and name the file with --plugin"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLUGIN: Plugin = Plugin { file: "libp.so", below: ["", "pushgate/of"], build: "`make`" };

    #[test]
    fn the_plugin_is_looked_for_beside_the_program_and_where_packages_put_it() {
        let root = std::env::temp_dir().join(format!("pushgate-find-{}", std::process::id()));
        let program = root.join("bin/pushgate");
        let beside = root.join("bin").join(PLUGIN.file);
        let packaged =
            root.join("lib").join(format!("{}-linux-gnu", std::env::consts::ARCH)).join(PLUGIN.file);
        let below = root.join("lib64/pushgate/of").join(PLUGIN.file);
        for file in [&beside, &packaged, &below] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        assert_eq!(PLUGIN.find(None, Some(&program)), Ok(beside.clone()));
        std::fs::remove_file(&beside).unwrap();
        assert_eq!(PLUGIN.find(None, Some(&program)), Ok(below.clone()));
        std::fs::remove_file(&below).unwrap();
        assert_eq!(PLUGIN.find(None, Some(&program)), Ok(packaged.clone()));
        // One that is named is taken, or missed, whatever lies elsewhere.
        assert_eq!(PLUGIN.find(Some(&packaged), None), Ok(packaged.clone()));
        let gone = PLUGIN.find(Some(&beside), Some(&program)).unwrap_err();
        assert!(gone.contains("`make`") && gone.contains(&beside.display().to_string()), "{gone}");
        std::fs::remove_file(&packaged).unwrap();
        let none = PLUGIN.find(None, Some(&program)).unwrap_err();
        assert!(none.contains("--plugin") && none.contains("`make`"), "{none}");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
