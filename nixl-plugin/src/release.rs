//! Which release of NIXL has loaded the plugin. NIXL tells a plugin the version of its plugin interface alone, which releases with other
//! classes share. The libraries of a wheel lie beside the wheel's description, whose name has the release (`nixl_cu13-1.5.1.dist-info`);
//! of a NIXL that was built from source it is not known.

use std::collections::BTreeSet;
use std::path::Path;

/// The first and the last minor release whose classes the shim lays out.
const FIRST: [u32; 2] = [1, 3];
const LAST: [u32; 2] = [1, 5];

/// Refuses to serve this process if each NIXL in it is known and has other classes.
pub fn check() -> Result<(), String> {
    std::fs::read_to_string("/proc/self/maps").map_or(Ok(()), |maps| check_of(&maps))
}

/// As [`check`], for a process with these mappings.
fn check_of(maps: &str) -> Result<(), String> {
    let libraries: BTreeSet<_> =
        maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).collect();
    let is_nixl =
        |path: &&Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"libnixl"));
    let mut refused = None;
    for library in libraries.into_iter().map(Path::new).filter(is_nixl) {
        match release_of(library) {
            Some((wheel, release)) if !(FIRST..=LAST).contains(&release) => refused = Some(wheel),
            _ => return Ok(()),
        }
    }
    let [[a, b], [c, d]] = [FIRST, LAST];
    refused.map_or(Ok(()), |wheel| {
        Err(format!("{wheel} has loaded the backend PUSHGATE, which serves NIXL {a}.{b} to {c}.{d}: install one of these"))
    })
}

/// The wheel that a library is of, and its minor release.
fn release_of(library: &Path) -> Option<(String, [u32; 2])> {
    let folder = library.parent()?;
    // `.nixl_cu13.mesonpy.libs` or `nixl_cu13.libs`.
    let name = folder.file_name()?.to_str()?.trim_start_matches('.').split('.').next()?;
    std::fs::read_dir(folder.parent()?).ok()?.flatten().find_map(|entry| {
        let entry = entry.file_name().into_string().ok()?;
        let release = entry.strip_prefix(name)?.strip_prefix('-')?.strip_suffix(".dist-info")?;
        let mut numbers = release.split('.').map_while(|part| part.parse().ok());
        Some((format!("{name} {release}"), [numbers.next()?, numbers.next()?]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_of_another_release_is_refused_by_its_name_and_what_is_not_known_is_served() {
        let root = std::env::temp_dir().join(format!("pushgate-nixl-release-{}", std::process::id()));
        let installed = |release: &str, library: &str| {
            let site = root.join(release);
            let library = site.join(library);
            std::fs::create_dir_all(library.parent().unwrap()).unwrap();
            std::fs::create_dir_all(site.join(format!("nixl_cu13-{release}.dist-info"))).unwrap();
            std::fs::create_dir_all(site.join("nixl_ep_cu13-9.0.0.dist-info")).unwrap();
            format!("7f00-7f01 r-xp 00000000 08:01 42    {}\n", library.display())
        };
        let [first, last, old, new] = [
            ("1.3.0", "nixl_cu13.libs/libnixl-5dc7d7dc.so"),
            ("1.5.1", ".nixl_cu13.mesonpy.libs/libnixl.so"),
            ("1.2.9", "nixl_cu13.libs/libnixl.so"),
            ("1.6.0rc1", ".nixl_cu13.mesonpy.libs/libnixl_common.so"),
        ]
        .map(|(release, library)| installed(release, library));
        let unknown = "7f00-7f01 r-xp 00000000 08:01 42    /opt/nixl/lib/libnixl.so\n7f02-7f03 rw-p 0 0 0\n";
        for maps in [first.clone() + &first, last.clone(), new.clone() + &last, unknown.into(), String::new()]
        {
            assert_eq!(check_of(&maps), Ok(()), "{maps}");
        }
        let refused = [old, new].map(|maps| check_of(&maps).unwrap_err());
        assert!(refused[0].starts_with("nixl_cu13 1.2.9 ") && refused[1].starts_with("nixl_cu13 1.6.0rc1 "));
        assert!(refused[1].contains("1.3 to 1.5"), "{refused:?}");
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_command_refuses_the_same_releases() {
        let line = format!("_FIRST, _LAST = {:?}, {:?}", (FIRST[0], FIRST[1]), (LAST[0], LAST[1]));
        let command = include_str!("../../python/src/pushgate/_nixl.py");
        assert!(command.lines().any(|other| other == line), "{line}");
    }
}
