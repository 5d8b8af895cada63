//! Links that no hardware has. A virtual machine's ports report what their emulation has, often 2.5 GT/s and one lane, and
//! the devices below what the host's hardware has.

use std::collections::BTreeMap;

use crate::link::Link;
use crate::tree::{Function, Parent, Role, Topology};

impl Topology {
    /// Forgets all links below a root complex where a function has a faster or wider link than the port above it, with a note:
    /// what such ports report bounds no transfer.
    pub(crate) fn drop_emulated_links(&mut self) {
        let mut emulated = BTreeMap::new();
        for f in self.functions.values() {
            let Parent::Function(up) = &f.parent else { continue };
            let Some(why) = self.functions.get(up).and_then(|port| exceeds(port, f)) else { continue };
            if let Some(root) = self.root_of(f) {
                emulated.entry(root.to_owned()).or_insert(why);
            }
        }
        let of_it = |f: &&Function| self.root_of(f).is_some_and(|root| emulated.contains_key(root));
        let all: Vec<_> = self.functions.values().filter(of_it).map(|f| f.address).collect();
        for at in all {
            if let Some(f) = self.functions.get_mut(&at) {
                f.link = Link::default();
            }
        }
        for (root, why) in emulated {
            self.notes.push(format!(
                "{root}: its links are emulated: {why}; none of them counts, and `pushgate probe` measures what they carry"
            ));
        }
    }

    /// The name of the root complex above a function.
    fn root_of(&self, f: &Function) -> Option<&str> {
        match self.above(f.address).0.last().map(|top| &top.parent) {
            Some(Parent::RootComplex(name)) => Some(name),
            _ => None,
        }
    }
}

/// How a function claims more of the link to the port above it than that port has. A port that claims more bounds nothing. The
/// speeds may have changed between the two reads, so a speed counts only where it is above the port's best.
fn exceeds(port: &Function, below: &Function) -> Option<String> {
    if !matches!(port.role, Role::RootPort | Role::DownstreamPort) {
        return None;
    }
    let (above, link) = (port.link.now?, below.link.now?);
    let too_fast = port.link.best.is_some_and(|best| link.gts > best.gts);
    (link.width > above.width || too_fast)
        .then(|| format!("{} says {above}, {} below it {link}", port.address, below.address))
}
