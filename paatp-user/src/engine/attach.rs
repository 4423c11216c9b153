//! Attaches the program, finds out what that got, and takes it off again.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, LinkError, PinnedLink};
use aya::programs::xdp::XdpLink;
use aya::programs::{Link as _, Xdp, XdpMode as AyaMode};
use tracing::{debug, warn};

use crate::cli::XdpMode;

use super::error::{Context, ENOTSUPP, EngineError, Step, error_number, explain};
use super::netlink;

/// Where the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachedMode {
    /// In the driver.
    Native,
    /// In the network stack.
    Generic,
}

impl fmt::Display for AttachedMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AttachedMode::Native => "native",
            AttachedMode::Generic => "generic",
        })
    }
}

impl AttachedMode {
    /// Whether this is what was asked for.
    #[must_use]
    pub fn is(self, asked: XdpMode) -> bool {
        match asked {
            XdpMode::Auto => true,
            XdpMode::Native => self == AttachedMode::Native,
            XdpMode::Generic => self == AttachedMode::Generic,
        }
    }
}

/// What holds the program: they die differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachedBy {
    /// A bpf_link: gone with this process, whatever ends it; nobody else can take it off.
    BpfLink,
    /// A bpf_link that is pinned: stays until its pin is removed.
    PinnedLink,
    /// Netlink: stays if this process is killed (`ip link set dev IF xdp off` takes it off).
    Netlink,
}

impl fmt::Display for AttachedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AttachedBy::BpfLink => "bpf_link",
            AttachedBy::PinnedLink => "pinned_link",
            AttachedBy::Netlink => "netlink",
        })
    }
}

/// An attached program; dropping it detaches unless its link is pinned.
#[derive(Debug)]
pub struct Attachment {
    interface: u32,
    mode: AttachedMode,
    program: u32,
    /// None where netlink holds it, or after detaching.
    link: Option<FdLink>,
    /// Where the link is pinned.
    pin: Option<PathBuf>,
    by: AttachedBy,
    attached: bool,
}

impl Attachment {
    /// Attaches a loaded program.
    ///
    /// # Errors
    /// With cause and remedy.
    pub fn new(
        xdp: &mut Xdp,
        index: u32,
        mode: XdpMode,
        context: &Context,
    ) -> Result<Attachment, EngineError> {
        let first = if mode == XdpMode::Generic { AttachedMode::Generic } else { AttachedMode::Native };
        match Self::attempt(xdp, index, first, context) {
            Err((number, refused)) if mode == XdpMode::Auto && worth_a_fallback(number) => {
                warn!(
                    interface = context.interface,
                    "{refused}\nfalling back to generic mode, which is several times slower; --xdp-mode native makes this an error"
                );
                Self::attempt(xdp, index, AttachedMode::Generic, context).map_err(|(_, error)| error)
            }
            result => result.map_err(|(_, error)| error),
        }
    }

    fn attempt(
        xdp: &mut Xdp,
        index: u32,
        mode: AttachedMode,
        context: &Context,
    ) -> Result<Attachment, (Option<i32>, EngineError)> {
        let aya_mode = match mode {
            AttachedMode::Native => AyaMode::Driver,
            AttachedMode::Generic => AyaMode::Skb,
        };
        let taken = xdp.attach_to_if_index(index, aya_mode).and_then(|id| xdp.take_link(id));
        let link = taken.map_err(|error| {
            let number = error_number(&error);
            let other_program = netlink::query(index).ok().and_then(|link| link.xdp?.program);
            let context = Context { other_program, ..context.clone() };
            (number, explain(Step::Attach { native: mode == AttachedMode::Native }, number, &context))
        })?;
        let program = xdp.info().map(|info| info.id()).unwrap_or(0);
        // aya falls back to netlink without a word; its link then cannot be turned into a descriptor. It is forgotten
        // by this (nothing is detached), so that `detach` below does it.
        let link = FdLink::try_from(link).ok();
        let by = if link.is_some() { AttachedBy::BpfLink } else { AttachedBy::Netlink };
        Ok(Attachment { interface: index, mode, program, link, pin: None, by, attached: true })
    }

    /// Takes over a pinned link that holds a program on an interface.
    ///
    /// # Errors
    /// If the pin cannot be opened.
    pub fn adopt(pin: &Path, index: u32, mode: AttachedMode, program: u32) -> Result<Attachment, LinkError> {
        let link = Some(FdLink::from(PinnedLink::from_pin(pin)?));
        let (by, pin) = (AttachedBy::PinnedLink, Some(pin.into()));
        Ok(Attachment { interface: index, mode, program, link, pin, by, attached: true })
    }

    /// Pins the link. If that fails, the program is off.
    ///
    /// # Errors
    /// If there is no link, or the kernel refuses.
    pub fn pin(&mut self, path: &Path) -> io::Result<()> {
        let link = self.link.take().ok_or(io::ErrorKind::Unsupported)?;
        self.attached = false;
        let pinned = link.pin(path).map_err(|error| match error_number(&error) {
            Some(number) => io::Error::from_raw_os_error(number),
            None => io::Error::other(error),
        })?;
        self.link = Some(pinned.into());
        (self.by, self.pin, self.attached) = (AttachedBy::PinnedLink, Some(path.into()), true);
        Ok(())
    }

    /// The pin has another name now, or is gone while the link is held by this process.
    pub fn set_pin(&mut self, pin: Option<PathBuf>) {
        self.by = if pin.is_some() { AttachedBy::PinnedLink } else { AttachedBy::BpfLink };
        self.pin = pin;
    }

    /// The program is on the interface, as far as this process did it.
    #[must_use]
    pub const fn is_attached(&self) -> bool {
        self.attached
    }

    /// Puts another program in the place of the one that the link holds: no packet meets neither.
    ///
    /// # Errors
    /// If the kernel refuses; the link is then as it was.
    pub fn replace(&mut self, xdp: &mut Xdp, context: &Context) -> Result<(), EngineError> {
        let Some(pin) = &self.pin else { return Ok(()) };
        let failed = |error: &(dyn std::error::Error + 'static)| {
            explain(Step::Attach { native: self.mode == AttachedMode::Native }, error_number(error), context)
        };
        // A descriptor of its own: the old one holds whatever happens.
        let link = PinnedLink::from_pin(pin).map_err(|error| failed(&error))?;
        let link = XdpLink::try_from(FdLink::from(link)).map_err(|error| failed(&error))?;
        let link =
            xdp.attach_to_link(link).and_then(|id| xdp.take_link(id)).map_err(|error| failed(&error))?;
        self.link = FdLink::try_from(link).ok();
        self.program = xdp.info().map(|info| info.id()).unwrap_or(0);
        Ok(())
    }

    /// Index of the interface.
    #[must_use]
    pub const fn interface(&self) -> u32 {
        self.interface
    }

    /// Where the program runs.
    #[must_use]
    pub const fn mode(&self) -> AttachedMode {
        self.mode
    }

    /// What holds it.
    #[must_use]
    pub const fn by(&self) -> AttachedBy {
        self.by
    }

    /// The program's id; 0 where the kernel did not tell.
    #[must_use]
    pub const fn program(&self) -> u32 {
        self.program
    }

    /// Leaves the program where it is, if its link is pinned. Says whether it is.
    pub fn leave(&mut self) -> bool {
        let stays = self.pin.is_some();
        if stays {
            self.attached = false;
            self.link = None;
        }
        stays
    }

    /// Takes the program off. Harmless if it is off already.
    pub fn detach(&mut self) {
        if !std::mem::take(&mut self.attached) {
            return;
        }
        // The pin first: the last to hold a link is to be this process, for then its end is not put off.
        if let Some(pin) = self.pin.take()
            && let Err(error) = std::fs::remove_file(&pin)
        {
            warn!(pin = %pin.display(), "cannot remove the pin of the link: {error}");
        }
        let result = match self.link.take() {
            Some(link) => link.detach().map_err(|error| error.to_string()),
            None => self.detach_by_netlink().map_err(|error| error.to_string()),
        };
        if let Err(error) = result {
            // The interface may be gone, and the program with it.
            debug!(error, "detaching");
        }
    }

    /// Takes our program off, and no other that may have taken its place.
    fn detach_by_netlink(&self) -> io::Result<()> {
        let attached = netlink::query(self.interface)?.xdp.and_then(|xdp| xdp.program);
        if attached != Some(self.program) {
            return Ok(());
        }
        let flags = match self.mode {
            AttachedMode::Native => netlink::DRV_MODE,
            AttachedMode::Generic => netlink::SKB_MODE,
        };
        netlink::detach(self.interface, flags)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if !self.leave() {
            self.detach();
        }
    }
}

/// Errors of native mode that generic mode may not have.
const fn worth_a_fallback(number: Option<i32>) -> bool {
    matches!(
        number,
        Some(libc::EOPNOTSUPP | ENOTSUPP | libc::EINVAL | libc::ERANGE | libc::ENOMEM | libc::ENOSPC)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallbacks_are_for_what_the_driver_cannot() {
        assert!(worth_a_fallback(Some(libc::EOPNOTSUPP)) && worth_a_fallback(Some(libc::ERANGE)));
        for number in [libc::EPERM, libc::EBUSY, libc::EEXIST, libc::ENODEV] {
            assert!(!worth_a_fallback(Some(number)));
        }
        assert!(!worth_a_fallback(None));
    }
}
