//! Which vector instructions this machine has: found at run time, so that one build serves every machine.
//!
//! The loops are written once, in plain Rust, and compiled once for each set of instructions. The compiler may neither
//! reorder nor fuse floating-point operations, so all sets give the same bits; they differ in speed alone.

/// Work that is compiled for every set of instructions.
///
/// `run` and all that it calls in its loops must be `#[inline(always)]`: only code inside the function that names the
/// instructions is compiled for them.
pub(crate) trait Work {
    type Output;

    fn run(self) -> Self::Output;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// A set of vector instructions that this machine has: there is no other way to get one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

impl Isa {
    /// The widest set here. The answer of the processor is cached by the standard library.
    #[must_use]
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self(Level::Avx512);
            }
            if is_x86_feature_detected!("avx2") {
                return Self(Level::Avx2);
            }
        }
        Self::portable()
    }

    /// What every machine has.
    #[must_use]
    pub fn portable() -> Self {
        Self(Level::Portable)
    }

    /// Every set that this machine has, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let best = Self::best();
        let mut found = vec![Self::portable()];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            found.push(Self(Level::Avx2));
        }
        if !found.contains(&best) {
            found.push(best);
        }
        found
    }

    /// `"avx512"`, `"avx2"` or `"portable"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }

    /// Runs `work` as compiled for this set.
    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        match self.0 {
            Level::Portable => work.run(),
            // SAFETY: an `Isa` of this level exists only where `best` or `available` has found the instructions.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { run_avx2(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { run_avx512(work) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<W: Work>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<W: Work>(work: W) -> W::Output {
    work.run()
}
