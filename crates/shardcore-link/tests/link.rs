//! Laws of the link, with ranks as threads of one process: a process may read itself.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

use std::thread;
use std::time::Duration;

use shardcore_link::{Link, LinkError, Pull};

const PATIENCE: Duration = Duration::from_secs(20);

/// Links of `world` ranks; nothing where the kernel refuses to let even this process read itself.
fn connected(world: usize) -> Option<Vec<Link>> {
    let links: Vec<Link> = (0..world).map(|rank| Link::new(rank).unwrap()).collect();
    let cards: Vec<String> = links.iter().map(Link::card).collect();
    for link in &links {
        match link.connect(&cards) {
            Ok(()) => {}
            Err(LinkError::Unavailable { reason }) => {
                eprintln!("not tested, because this machine refuses: {reason}");
                return None;
            }
            Err(other) => panic!("{other}"),
        }
    }
    Some(links)
}

/// Gives away `source` and pulls each peer's `part`-th of `world` equal parts of what it gives, or all of it.
fn exchange(link: &Link, rank: usize, world: usize, tag: u64, source: &[u64], part: Option<usize>) -> Vec<Vec<u64>> {
    let numel = if part.is_some() { source.len() / world } else { source.len() };
    let mut received = vec![vec![0_u64; numel]; world];
    let pulls = (0..world).filter(|&peer| peer != rank).map(|peer| Pull {
        peer,
        offset: part.unwrap_or(0) * numel * 8,
        into: received[peer].as_mut_ptr().addr(),
        nbytes: numel * 8,
    });
    let pulls = pulls.collect();
    // SAFETY: `source` and `received` outlive the wait below.
    let sequence = unsafe { link.exchange(tag, source.as_ptr().addr(), source.len() * 8, pulls) }.unwrap();
    assert!(link.wait(sequence, PATIENCE).unwrap(), "an exchange took too long");
    received
}

#[test]
fn every_rank_gets_every_part_in_many_exchanges() {
    for world in [2, 3, 5] {
        let Some(links) = connected(world) else { return };
        thread::scope(|scope| {
            for (rank, link) in links.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..200_u64 {
                        let value = |rank: usize, i: usize| round * 1_000_000 + (rank * 10_000 + i) as u64;
                        let source: Vec<u64> = (0..world * 17).map(|i| value(rank, i)).collect();
                        let whole = exchange(link, rank, world, round, &source, None);
                        let parts = exchange(link, rank, world, round, &source, Some(rank));
                        for peer in (0..world).filter(|&peer| peer != rank) {
                            let expected: Vec<u64> = (0..world * 17).map(|i| value(peer, i)).collect();
                            assert_eq!(whole[peer], expected);
                            assert_eq!(parts[peer], expected[rank * 17..(rank + 1) * 17]);
                        }
                    }
                });
            }
        });
        assert!(links.iter().all(|link| link.num_complete() == 400));
    }
}

#[test]
fn an_exchange_is_not_complete_before_every_peer_has_read() {
    let Some(links) = connected(2) else { return };
    let source = [1_u64; 4];
    // SAFETY: nothing is pulled, and `source` outlives the links' last exchange.
    let sequence = unsafe { links[0].exchange(7, source.as_ptr().addr(), 32, Vec::new()) }.unwrap();
    assert_eq!(links[0].wait(sequence, Duration::from_millis(120)), Ok(false));
    assert_eq!(exchange(&links[1], 1, 2, 7, &[2; 4], None)[0], source);
    assert_eq!(links[0].wait(sequence, PATIENCE), Ok(true));
}

#[test]
fn ranks_in_different_exchanges_fail_and_read_nothing() {
    let Some(links) = connected(2) else { return };
    let mut received = [0_u64; 4];
    let source = [3_u64; 4];
    let pull = |peer, nbytes| Pull { peer, offset: 0, into: received.as_ptr().addr(), nbytes };
    let (first, second) = (pull(1, 32), pull(0, 32));
    // SAFETY: nothing is written to `received`, since both tags differ.
    unsafe {
        links[0].exchange(1, source.as_ptr().addr(), 32, vec![first]).unwrap();
        links[1].exchange(2, source.as_ptr().addr(), 32, vec![second]).unwrap();
    }
    assert_eq!(links[0].wait(0, PATIENCE), Err(LinkError::Mismatch { peer: 1, sequence: 0 }));
    assert_eq!(links[1].wait(0, PATIENCE), Err(LinkError::Mismatch { peer: 0, sequence: 0 }));
    received[0] += 0;
    assert_eq!(received, [0; 4]);
}

#[test]
fn a_read_beyond_what_is_given_is_refused() {
    let Some(links) = connected(2) else { return };
    let mut received = [0_u64; 8];
    let source = [3_u64; 4];
    let pull = Pull { peer: 1, offset: 8, into: received.as_mut_ptr().addr(), nbytes: 32 };
    // SAFETY: the read is refused.
    unsafe {
        links[1].exchange(1, source.as_ptr().addr(), 32, Vec::new()).unwrap();
        links[0].exchange(1, source.as_ptr().addr(), 32, vec![pull]).unwrap();
    }
    assert_eq!(links[0].wait(0, PATIENCE), Err(LinkError::Mismatch { peer: 1, sequence: 0 }));
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let Some(links) = connected(2) else { return };
    let mut received = [0_u64; 4];
    let pull = Pull { peer: 1, offset: 0, into: received.as_mut_ptr().addr(), nbytes: 32 };
    // SAFETY: the kernel refuses to read address 8.
    unsafe {
        links[1].exchange(1, 8, 32, Vec::new()).unwrap();
        links[0].exchange(1, received.as_ptr().addr(), 32, vec![pull]).unwrap();
    }
    assert!(matches!(links[0].wait(0, PATIENCE), Err(LinkError::ReadFailed { peer: 1, .. })));
}

#[test]
fn closing_ends_waits() {
    let Some(links) = connected(2) else { return };
    let source = [0_u64; 4];
    // SAFETY: nothing is pulled.
    let sequence = unsafe { links[0].exchange(1, source.as_ptr().addr(), 32, Vec::new()) }.unwrap();
    links[0].close();
    assert_eq!(links[0].wait(sequence, PATIENCE), Err(LinkError::Closed));
}

#[test]
fn a_card_of_elsewhere_is_refused() {
    let link = Link::new(0).unwrap();
    for card in ["", "a b c d", "elsewhere 1 3 4096"] {
        let error = link.connect(&[link.card(), card.to_owned()]).unwrap_err();
        assert!(matches!(error, LinkError::Unavailable { .. }), "{error}");
    }
}
